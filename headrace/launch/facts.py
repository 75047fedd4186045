"""Gathers the facts `resolve` needs, then calls it: the one place that joins finding a model and
asking the machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.base import env, extensions
from headrace.base.config.kimi_audio import CHAT_TEMPLATE
from headrace.base.config.resolved import Decision, Resolved, ServerSpec, TextSpec
from headrace.base.config.server_options import ServerOptions
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError, MissingDependency
from headrace.base.optional import available
from headrace.front.text.tokenizer_files import read_facts
from headrace.launch.chooser import Chooser
from headrace.launch.drafters import find_draft
from headrace.launch.locate import LocatedModel, locate
from headrace.launch.media_spec import encoding_alone
from headrace.launch.model_facts import ModelFacts, read_model_facts
from headrace.launch.resolve import resolve, server_spec, text_spec
from headrace.launch.resolve_device import MachineFacts
from headrace.launch.topology import device_facts


def resolve_options(options: Options, planned: MachineFacts | None = None) -> Resolved:
    """Finds the model, asks the machine (or takes a `planned` one), resolves; StartError for
    whatever the user must mend."""
    if options.scheduler.grammar_backend == "xgrammar" and not available("xgrammar"):
        raise MissingDependency(
            "--grammar-backend xgrammar needs the library 'xgrammar': pip install 'headrace[xgrammar]'"
        )
    check_grpc(options.server)
    extensions.allow(options.model.extensions)
    located, facts = find_model(options)
    options = msgspec.structs.replace(options, server=with_keys(options.server))
    draft = find_draft(options, facts)
    resolved = resolve(options, facts, planned or device_facts(options.device.device), draft)
    where = (*located.decisions, *(() if draft is None else draft.decisions))
    return msgspec.structs.replace(resolved, decisions=(*where, *resolved.decisions))


def find_model(options: Options) -> tuple[LocatedModel, ModelFacts]:
    """The model that the options name, and what its files say."""
    located = locate(options.model)
    facts = encoding_alone(options, read_model_facts(located, family=options.model.family))
    return located, msgspec.structs.replace(facts, chat_template=_chat_template(options, facts))


def resolve_text(options: Options) -> tuple[TextSpec, ServerSpec, tuple[Decision, ...]]:
    """What a server of texts alone needs: no weights are looked at, no device is asked for."""
    check_grpc(options.server)
    extensions.allow(options.model.extensions)
    located, facts = find_model(options)
    choose = Chooser()
    text = text_spec(options, facts, choose)
    server = server_spec(with_keys(options.server))
    return text, server, (*located.decisions, *choose.decisions)


def check_grpc(options: ServerOptions) -> None:
    """MissingDependency if gRPC is wanted without its libraries."""
    for library in ("grpc", "grpc_health", "grpc_reflection"):
        if options.grpc_port is not None and not available(library):
            raise MissingDependency(
                f"--grpc-port needs the library {library!r}: pip install 'headrace[grpc]'"
            )


def _chat_template(options: Options, facts: ModelFacts) -> str | None:
    """The file the user named, else what the model's facts or its tokenizer's folder hold."""
    path = options.model.chat_template
    if path is None:
        folder = Path(options.model.tokenizer or facts.tokenizer_path)
        own_template = read_facts(folder).chat_template if folder.is_dir() else None
        return (
            facts.chat_template
            or own_template
            or (None if facts.media is None else facts.media.template)
            or _TEMPLATES.get(str(facts.config.get("model_type")))
        )
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: it cannot be read: {error}") from None


_TEMPLATES = {"kimi_audio": CHAT_TEMPLATE}
"""By `model_type`, of models whose checkpoints have none."""


def with_keys(options: ServerOptions) -> ServerOptions:
    """Keys may come by the environment, where the process list does not show them."""
    keys = env.get("HEADRACE_API_KEYS")
    if keys is not None and not options.api_keys:
        options = msgspec.structs.replace(options, api_keys=tuple(keys.split(",")))
    if options.admin_key is None:
        options = msgspec.structs.replace(options, admin_key=env.get("HEADRACE_ADMIN_KEY"))
    return options
