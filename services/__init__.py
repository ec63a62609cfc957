"""The four services, in the order in which a request passes them."""
