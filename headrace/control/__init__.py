"""Changes of the models that a deployment is to serve, on the control topic of the log."""
