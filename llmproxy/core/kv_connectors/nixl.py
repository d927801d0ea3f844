"""vLLM's NixlConnector: the decode engine pulls the blocks that `kv_transfer_params` name from the prefill engine.

The fields are those of vLLM 0.13 and later. The value is passed to the decode engine unchanged, because newer versions
add members to it, and both engines are of one version.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import DecodeError, Meta, Raw, Struct, ValidationError
from msgspec.json import Decoder

from llmproxy.core.kv_connectors.connector import KvConnector, NotHandedOver, Parameters, connectors

AGE_MAX_S = 10.0
"""Maximum age of parameters that are used; a third of the lease if that is less. The lease of the blocks begins with
the answer of the prefill engine, and is extended only once the decode engine has the request. After the lease, the
decode engine would read the blocks of another prompt, answer 200 with a wrong text, and keep the wrong blocks in its
cache."""


class _Answer(Struct):
    kv_transfer_params: Raw = Raw(b"null")


class _Params(Struct):
    """The required members of `kv_transfer_params`. vLLM 0.32 crashes if a member is missing."""

    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: list[Any]
    remote_host: Annotated[str, Meta(min_length=1)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    tp_size: Annotated[int, Meta(ge=1)]


_answers, _params = Decoder(_Answer), Decoder(_Params)


@connectors.register("nixl")
class Nixl(KvConnector):
    """vLLM's NIXL connector. The decode engine fetches the blocks of the prompt from the prefill engine.

    The prefill engine keeps the blocks for `lease_s`, and says in its answer where they are.
    """

    asks = (
        b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
        b'"remote_host":null,"remote_port":null}'
    )
    frees_refused = True

    def parameters(self, answer: bytes) -> Parameters:
        try:
            value = bytes(_answers.decode(answer).kv_transfer_params)
        except (DecodeError, UnicodeDecodeError) as error:
            raise NotHandedOver(f"The answer is no JSON object: {error}.", missing=False) from None
        if value == b"null":
            raise NotHandedOver("The answer has no kv_transfer_params: no KV connector is configured.", missing=True)
        try:
            params = _params.decode(value)
        except (ValidationError, DecodeError, UnicodeDecodeError) as error:
            raise NotHandedOver(f"kv_transfer_params of the answer: {error}.", missing=False) from None
        if not params.do_remote_prefill:
            raise NotHandedOver("kv_transfer_params of the answer: do_remote_prefill is false.", missing=False)
        return Parameters(value, params.remote_host, min(self.lease_s / 3, AGE_MAX_S))
