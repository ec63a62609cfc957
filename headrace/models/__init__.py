"""Models: their files (`repository.py`), inputs and outputs (`signature.py`), backends
(`backends`), and the versions that are ready now (`registry.py`).
"""
