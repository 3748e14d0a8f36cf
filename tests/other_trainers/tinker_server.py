"""A small server that speaks the part of the Tinker API (0.38) which training needs, around one model in this process.

Losses as Tinker documents them, sums over tokens: "importance_sampling" -exp(logprob - sampled) * advantage,
"cross_entropy" -logprob * weight. Optimizer: AdamW. Every request is done when it is answered; `retrieve_future` hands
the result over.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request, Response
from tinker.proto import tinker_public_pb2 as proto
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

DTYPES = {proto.DTYPE_FLOAT32: np.float32, proto.DTYPE_INT64: np.int64}
PROTOBUF = "application/x-protobuf"


def row_of(datum: proto.Datum) -> dict[str, torch.Tensor]:
    """The input tokens and what the loss takes, by name."""
    chunks = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in datum.model_input]
    row = {"tokens": torch.from_numpy(np.concatenate(chunks).astype(np.int64))}
    for name, tensor in datum.loss_fn_inputs.items():
        row[name] = torch.from_numpy(np.frombuffer(tensor.dense, DTYPES[tensor.dtype]).copy())
    return row


class TinkerServer:
    """The state behind the routes of `app`."""

    def __init__(self, model_path: Path, weights_dir: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0)
        self.weights_dir = weights_dir
        self.losses: list[str] = []
        """Loss of every forward_backward, in order."""
        self.num_steps = 0
        self._results: dict[str, bytes | dict[str, Any]] = {}
        self._numbers = itertools.count()

    def promise(self, result: bytes | dict[str, Any]) -> dict[str, Any]:
        request_id = f"request-{next(self._numbers)}"
        self._results[request_id] = result
        return {"request_id": request_id, "model_id": "model-0"}

    def result(self, request_id: str) -> bytes | dict[str, Any]:
        return self._results[request_id]

    def forward_backward(self, body: bytes) -> bytes:
        request = proto.ForwardBackwardRequest.FromString(body)
        self.losses.append(request.loss_fn)
        rows = [row_of(datum) for datum in request.data]
        tokens_BT = pad_sequence([row["tokens"] for row in rows], batch_first=True)
        tables_BTV = self.model(tokens_BT).logits.log_softmax(-1)
        total = torch.zeros(())
        outputs = []
        for row, table_TV in zip(rows, tables_BTV, strict=True):
            targets = row["target_tokens"]
            logprobs = table_TV[: len(targets)].gather(-1, targets[:, None]).squeeze(-1)
            if request.loss_fn == "importance_sampling":
                gain = (logprobs - row["logprobs"]).exp() * row["advantages"]
            else:
                assert request.loss_fn == "cross_entropy"
                gain = logprobs * row["weights"]
            total = total - gain.sum()
            outputs.append(logprobs.detach().numpy())
        total.backward()
        ends = np.cumsum([0, *(output.nbytes for output in outputs)], dtype=np.int64)
        answer = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        answer.metrics["loss:sum"] = float(total.detach())
        record = answer.loss_fn_outputs.add()
        record.fields["logprobs"].data = np.concatenate(outputs).tobytes()
        record.fields["logprobs"].offsets = ends.tobytes()
        record.fields["logprobs"].dtype = proto.DTYPE_FLOAT32
        return answer.SerializeToString()

    def optim_step(self, adam: dict[str, Any]) -> None:
        for settings in self.optimizer.param_groups:
            settings["lr"] = adam["learning_rate"]
            settings["betas"] = (adam["beta1"], adam["beta2"])
            settings["eps"] = adam["eps"]
        if adam["grad_clip_norm"]:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), adam["grad_clip_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    def save(self, name: str) -> str:
        self.model.save_pretrained(self.weights_dir / name)
        return f"tinker://model-0/sampler_weights/{name}"


def make_app(server: TinkerServer) -> FastAPI:
    app = FastAPI()

    @app.post("/api/v1/client/config")
    @app.post("/api/v1/client/dynamic_config")
    async def config() -> dict[str, Any]:
        return {"use_pyqwest_transport": False}

    @app.post("/api/v1/create_session")
    async def create_session() -> dict[str, Any]:
        return {"session_id": "session-0"}

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat() -> dict[str, Any]:
        return {}

    @app.post("/api/v1/sessions/{session_id}/finish")
    async def finish(session_id: str) -> dict[str, Any]:
        return {}

    @app.post("/api/v1/telemetry")
    async def telemetry() -> dict[str, Any]:
        return {"status": "accepted"}

    @app.post("/api/v1/create_model")
    async def create_model() -> dict[str, Any]:
        return server.promise({"model_id": "model-0"})

    @app.post("/api/v1/get_info")
    async def get_info() -> dict[str, Any]:
        return {"model_id": "model-0", "model_data": {"model_name": "tiny"}}

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        assert request.headers["content-type"] == PROTOBUF
        return server.promise(server.forward_backward(await request.body()))

    @app.post("/api/v1/optim_step")
    async def optim_step(body: dict[str, Any]) -> dict[str, Any]:
        server.optim_step(body["adam_params"])
        return server.promise({"metrics": {}})

    @app.post("/api/v1/save_weights_for_sampler")
    async def save_weights(body: dict[str, Any]) -> dict[str, Any]:
        return server.promise({"path": server.save(body["path"])})

    @app.post("/api/v1/retrieve_future", response_model=None)
    async def retrieve(body: dict[str, Any]) -> Response | dict[str, Any]:
        result = server.result(body["request_id"])
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else result

    return app
