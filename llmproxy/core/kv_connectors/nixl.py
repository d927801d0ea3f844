"""vLLM's NixlConnector, whose second engine pulls: `kv_transfer_params` name the blocks in the first engine.

The fields are those of vLLM 0.13 and later. The value goes to the second engine byte by byte, because versions add
members to it, and engines of one build understand each other's.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import DecodeError, Meta, Raw, Struct, ValidationError
from msgspec.json import Decoder

from llmproxy.core.kv_connectors.connector import KvConnector, NotHandedOver, Parameters, connectors

AGE_MAX_S = 10.0
"""The oldest parameters that are used. The lease of the blocks begins with the answer of the first engine, and is
extended only once the second one has the request. A read after the lease is answered 200 with the text of another
prompt, which stays in the cache of the second engine."""


class _Answer(Struct):
    kv_transfer_params: Raw = Raw(b"null")


class _Params(Struct):
    """What an engine must find in them. vLLM 0.32 dies where one of these members is missing."""

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
    """The first engine keeps the blocks of the prompt for a lease and says where they are."""

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
