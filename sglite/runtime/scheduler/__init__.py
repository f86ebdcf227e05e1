"""What runs in the next step and what its result means, in numbers: no tensors.

policy.py      the waiting list and the order in which it is admitted
held.py        rows that wait to be continued
rows.py        the running rows as arrays; builds the batch
running.py     the running requests and their pages
admission.py   from the waiting list to a row
drafts.py      tokens that are tried ahead where the text repeats itself
scheduler.py   schedule(): budget, pages, retraction, admission, in this order
masks.py       which tokens each draw may give
delayed.py     a grammar that begins after a marker
outputs.py     apply(): append, advance, stop, finish
answers.py     what the client gets
"""
