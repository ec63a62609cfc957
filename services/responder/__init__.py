"""Responder: write one answer for each request, and dead letters."""
