"""`sglite bench programs`: programs against the same work as loose calls, in one run on one engine.

shapes.py     how large everything is, and texts of a given number of tokens
workloads.py  each workload twice: as a program, and as calls that know nothing of each other
record.py     a client that writes down what passes through it
price.py      pure numbers from a record: critical path, least tokens, hit rates
run.py        runs, repeats, report
"""
