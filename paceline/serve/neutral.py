"""Fields of vLLM that this server takes only where they ask for nothing, and refuses otherwise."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.serve.fields import Body, Float, Int, Unsupported

Zero = Annotated[Int, Field(ge=0, le=0)]
One = Annotated[Float, Field(ge=1, le=1)]
NoItems = Annotated[list[Any], Field(max_length=0)]
NoFields = Annotated[dict[str, Any], Field(max_length=0)]


class NeutralFields(Body):
    """Of every endpoint that samples: clients of vLLM send these with their defaults."""

    length_penalty: Annotated[
        One | None, Unsupported("is not served: it is for beam search. Leave it out, or set it to 1")
    ] = None
    use_beam_search: Annotated[Literal[False] | None, Unsupported("is not served: use n, and choose")] = None
    spaces_between_special_tokens: Annotated[
        Literal[True] | None,
        Unsupported("is not served: special tokens are spelled as they are. Leave it out, or set it to true"),
    ] = None
    truncate_prompt_tokens: Annotated[None, Unsupported("is not served: shorten the prompt yourself")] = None
    priority: Annotated[Zero | None, Unsupported("is not served: requests run in order. Set it to 0")] = None
    kv_transfer_params: Annotated[NoFields | None, Unsupported("is not served: leave it out")] = None
    vllm_xargs: Annotated[NoFields | None, Unsupported("is not served: leave it out")] = None
