"""An H200 that computes nothing: the engine, its grammars and its programs against a device that only takes time.

    from benchmarks.simulated import Simulation, engine, installed

    with engine(EngineConfig(model=FOLDER), Simulation(slower=1.5)) as one: ...     # an Engine as any other
    with installed(Simulation(slower=1.5)): ...                                     # every Engine(...) is one

    python -m benchmarks.simulated FOLDER [--workloads json_1,free_1] [--slower 1.5]

FOLDER holds config.json and a tokenizer; its sizes choose the times of the 0.6B or of the 8B shape.

What is real: everything above the executor's contract (scheduling, prefix cache, matchers, masks, forced text, drafts,
streams, programs), and of the executor the planning of inputs and draws. What is simulated: steps take the device as
long as they took an H200 (`times.py`), launches hold the host up as they did there, tokens are a hash of the text
before them, legal under their mask (`model.py`), found by a native thread whose work is not the host's.

What it can say: whether the host keeps up with the device, what it spends its time on, and how a change of the
host's work changes a rate, as a ratio within one run. What it cannot: anything about kernels; rates to better than
the table's interpolation (some 10 %), the more so for sizes and contexts that were not measured; what the driver's
threads and 16 real cores would do; text, accepted drafts and ends of texts as a trained model has them (`agree` is a
guess for the drafts alone).
"""

from benchmarks.simulated.engine import Simulation, build, engine, installed
from benchmarks.simulated.executor import SimulatedExecutor

__all__ = ["SimulatedExecutor", "Simulation", "build", "engine", "installed"]
