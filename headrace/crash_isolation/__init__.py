"""After an unclean end: which record ended the process, and what runs meanwhile."""
