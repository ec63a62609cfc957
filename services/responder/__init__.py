"""Responder: results come in; one answer for each request goes out, and dead letters."""
