"""What `headrace serve` says may be tried first."""

from headrace.base.config.resolved import ServerSpec, TextSpec
from headrace.cli.serve import what_to_try


def text_spec(template: str | None, *, spectrogram: tuple[int, ...] = ()) -> TextSpec:
    return TextSpec(
        tokenizer_path="",
        chat_template=template,
        model_names=("it's",),
        generation_defaults={},
        logits_width=8,
        eos_ids=(1,),
        max_model_len=16,
        spectrogram=spectrogram,
    )


def test_a_model_that_only_hears_is_asked_with_a_recording() -> None:
    server = ServerSpec(
        api_key_digests=(),
        api_key_file=None,
        admin_key_digest=None,
        admin_listen=None,
        profile_dir=None,
        max_body_bytes=1,
        body_budget_bytes=1,
        max_bytes_per_key=None,
        file_store_bytes=0,
        response_store="off",
        response_store_bytes=0,
        otlp_endpoint=None,
    )
    heard = what_to_try(text_spec(None, spectrogram=(80, 3000)), server, "http://0.0.0.0:8000")
    curl, client = heard.splitlines()
    assert curl.startswith("try:  curl http://127.0.0.1:8000/v1/audio/transcriptions -F file=@")
    assert curl.endswith("-F 'model=it'\\''s'")
    assert 'audio.transcriptions.create(model="it\'s", file=open("speech.wav", "rb"))' in client
    for asked in (text_spec("{{ messages }}", spectrogram=(80, 3000)), text_spec(None)):
        assert "/v1/chat/completions" in what_to_try(asked, server, "http://0.0.0.0:8000")
