"""The floor for `vm_status`: one plain Starlette route behind the same server, without anything of ours."""

from __future__ import annotations

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def answer(request: Request) -> JSONResponse:
    await request.json()
    return JSONResponse({"vm_id": "vm-1", "state": "running", "jobs": []})


def main(port: int) -> None:
    app = Starlette(routes=[Route("/v1/tools/vm_status", answer, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False, http="h11", loop="asyncio")


if __name__ == "__main__":
    main(int(sys.argv[1]))
