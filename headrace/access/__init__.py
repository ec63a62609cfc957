"""Access of callers: TLS, logins, what each login opens, and the limits of each caller."""
