"""What to ask: programs. No torch, nothing of the runtime; whatever answers is a `Client` (client.py).

    api.py          gen, select, user, ...: check their arguments and make nodes        nodes.py  the frozen operations
    program.py      @function: run, run_batch, stream, trace, compile                   state.py  `s` and its forks
    branch.py       a running state: operations are queued, carried out in order by one task; variables are slots
    interpreter.py  one method an operation; lower.py makes the requests and the meta info
    transcript.py   what was said as token ids; roles.py reads message borders off the chat template
    bridge.py       who waits where: threads, greenlets, coroutines; runner.py, batch.py, prefix.py run programs
    trace.py        a program against placeholders -> a graph; outlook.py, compiled.py make use of it
    timeline.py     what happened when, as a page
    backends/       sglite and SGLang servers, OpenAI's API

    transcript.py   what was said, as token ids; roles.py reads message borders off the chat template
-> a request goes to the client (lower) -> the answer's pieces are shown, its ids kept, its slot filled -> reads return.
"""
