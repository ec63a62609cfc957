"""`headrace demo`: two models, the files that they classify, and a live view."""
