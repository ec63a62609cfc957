"""`headrace demo`: two models, the files they are asked about, and a view of what happens."""
