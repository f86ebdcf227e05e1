"""Which KV pages hold which tokens, in numbers: no tensors.

page_allocator.py  which pages are free
radix_tree.py      from token prefixes to pages, with locks and leases
eviction.py        which prefix goes first
manager.py         the one owner of the three, and the invariant over all pages
"""
