"""Who may connect and call: TLS, logins, what they open, and the limits of each caller."""
