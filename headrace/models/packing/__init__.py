"""Manifests of versions: what they hold (`manifest.py`), how they are made from and checked against
files (`files.py`), and who signed them (`signatures.py`).
"""
