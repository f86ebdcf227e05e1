"""What a type checker sees of sglite/__init__.py."""

from sglite._version import __version__ as __version__
from sglite.errors import (
    BackendError as BackendError,
)
from sglite.errors import (
    EngineDead as EngineDead,
)
from sglite.errors import (
    GrammarError as GrammarError,
)
from sglite.errors import (
    GrammarTimeout as GrammarTimeout,
)
from sglite.errors import (
    GrammarTooLarge as GrammarTooLarge,
)
from sglite.errors import (
    GrammarViolation as GrammarViolation,
)
from sglite.errors import (
    IncompleteOutput as IncompleteOutput,
)
from sglite.errors import (
    InvalidGrammar as InvalidGrammar,
)
from sglite.errors import (
    InvalidRequest as InvalidRequest,
)
from sglite.errors import (
    ModelError as ModelError,
)
from sglite.errors import (
    ModelNotFound as ModelNotFound,
)
from sglite.errors import (
    OutOfPages as OutOfPages,
)
from sglite.errors import (
    Overloaded as Overloaded,
)
from sglite.errors import (
    ProgramError as ProgramError,
)
from sglite.errors import (
    ProgramSyntaxError as ProgramSyntaxError,
)
from sglite.errors import (
    PromptTooLong as PromptTooLong,
)
from sglite.errors import (
    RequestAborted as RequestAborted,
)
from sglite.errors import (
    SgliteError as SgliteError,
)
from sglite.errors import (
    UnsupportedModel as UnsupportedModel,
)
from sglite.errors import (
    UnsupportedSchema as UnsupportedSchema,
)
from sglite.lang.api import (
    assistant as assistant,
)
from sglite.lang.api import (
    assistant_begin as assistant_begin,
)
from sglite.lang.api import (
    assistant_end as assistant_end,
)
from sglite.lang.api import (
    flush_cache as flush_cache,
)
from sglite.lang.api import (
    function as function,
)
from sglite.lang.api import (
    gen as gen,
)
from sglite.lang.api import (
    gen_int as gen_int,
)
from sglite.lang.api import (
    gen_string as gen_string,
)
from sglite.lang.api import (
    get_server_info as get_server_info,
)
from sglite.lang.api import (
    image as image,
)
from sglite.lang.api import (
    select as select,
)
from sglite.lang.api import (
    separate_reasoning as separate_reasoning,
)
from sglite.lang.api import (
    set_default_backend as set_default_backend,
)
from sglite.lang.api import (
    system as system,
)
from sglite.lang.api import (
    system_begin as system_begin,
)
from sglite.lang.api import (
    system_end as system_end,
)
from sglite.lang.api import (
    user as user,
)
from sglite.lang.api import (
    user_begin as user_begin,
)
from sglite.lang.api import (
    user_end as user_end,
)
from sglite.lang.api import (
    video as video,
)
from sglite.lang.backends.openai import OpenAI as OpenAI
from sglite.lang.backends.runtime import Runtime as Runtime
from sglite.lang.backends.sglite_server import RuntimeEndpoint as RuntimeEndpoint
from sglite.lang.choices import (
    greedy_token_selection as greedy_token_selection,
)
from sglite.lang.choices import (
    token_length_normalized as token_length_normalized,
)
from sglite.lang.choices import (
    total_probability as total_probability,
)
from sglite.lang.choices import (
    unconditional_likelihood_normalized as unconditional_likelihood_normalized,
)
from sglite.lang.config import global_config as global_config
from sglite.lang.state import ProgramState as ProgramState
from sglite.protocol import (
    FinishReason as FinishReason,
)
from sglite.protocol import (
    GrammarSpec as GrammarSpec,
)
from sglite.protocol import (
    RequestOutput as RequestOutput,
)
from sglite.protocol import (
    SamplingParams as SamplingParams,
)
from sglite.protocol import (
    Usage as Usage,
)
from sglite.runtime.async_engine import Engine as Engine

__all__: list[str]
