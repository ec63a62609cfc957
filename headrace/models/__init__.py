"""Models: their files (`repository.py`), inputs and outputs (`signature.py`), backends
(`backend.py` and its adapters), and the versions that are ready now (`registry.py`).
"""
