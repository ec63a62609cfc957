"""Repositories in object stores: the store (`store.py`), the cache of this machine (`cache.py`,
with its rule in `eviction.py`), the repository made of both (`remote.py`), and copies between a
store and a directory (`copying.py`).
"""
