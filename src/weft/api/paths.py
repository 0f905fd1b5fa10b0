"""What to say to a client that asks for a path that is not here: the one it means, or what weft does not do."""

from collections.abc import Iterable

# Operations of other servers, by the word that begins their paths behind /v1.
ABSENT = {
    "embeddings": "weft writes text and has no embeddings yet",
    "rerank": "weft writes text and ranks nothing yet",
    "score": "weft writes text and scores nothing yet",
    "classify": "weft writes text and classifies nothing",
    "pooling": "weft writes text and has no embeddings yet",
    "images": "weft makes no images; images in messages are read",
    "audio": "weft reads and writes no audio",
    "realtime": "weft has no realtime sessions; use /v1/responses",
    "moderations": "there is no moderation",
    "files": "weft keeps no files; send what they hold in the request",
    "batches": "weft has no batch files; send the requests at once, they share the batch",
    "assistants": "weft has no assistants; use /v1/responses",
    "threads": "weft has no threads; use /v1/responses with previous_response_id",
    "fine_tuning": "weft trains nothing",
    "vector_stores": "weft searches nothing",
    "complete": "it is Anthropic's older API; use /v1/messages",
    "engines": "it is OpenAI's older API; use /v1/completions",
    "infill": "there is no fill-in-the-middle yet",
}


def hint_for(path: str, known: Iterable[str]) -> str:
    """Return a clause that says where to go instead of `path`; "" if nothing near is known."""
    plain = path.rstrip("/") or "/"
    while plain.startswith("/v1/v1/"):
        plain = plain.removeprefix("/v1")
    served = {*known}
    for candidate in (plain, f"/v1{plain}"):
        if candidate in served and candidate != path:
            return f"{candidate} is meant; {_advice(path)}"
    head = plain.removeprefix("/v1").removeprefix("/v2").removeprefix("/api").strip("/").partition("/")[0]
    return ABSENT.get(head.replace("-", "_"), "")


def _advice(path: str) -> str:
    if path.startswith("/v1/v1"):
        return "the client's base URL has /v1 twice, and the client adds it too: leave it out there"
    return "end the client's base URL with /v1" if not path.startswith("/v1") else "write it without the slash at its end"
