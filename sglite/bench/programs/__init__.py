"""`sglite bench programs`: programs against the same work as loose calls, in one run on one engine.

shapes.py     how large everything is, and texts of a given number of tokens
workloads.py  each workload twice: as a program, and as calls that know nothing of each other
loose.py      what such calls are made with: an engine, or HTTP
record.py     a client that writes down what passes through it
served.py     a server of its own process, over such a client
stands.py     where the workloads run: on an engine, or against a server
price.py      pure numbers from a record: critical path, least tokens, hit rates
run.py        runs, repeats, report
"""
