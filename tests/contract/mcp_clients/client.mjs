// One conversation with the service at MICROVM_URL through an official TypeScript client; prints what it saw as JSON.
// usage: node client.mjs sdk | legacy | auto | pinned   (sdk: the 1.x package; the others: modes of the 2.x package)

import { readFileSync } from "node:fs";

const mode = process.argv[2];
const url = new URL("/mcp", process.env.MICROVM_URL);
const token = readFileSync(process.env.MICROVM_TOKEN_FILE, "ascii").trim();
const options = { requestInit: { headers: { Authorization: `Bearer ${token}` } } };
const who = { name: "contract-test", version: "1.0.0" };
const NEGOTIATION = { legacy: { mode: "legacy" }, auto: { mode: "auto" }, pinned: { mode: { pin: "2026-07-28" } } };

async function connect() {
  if (mode === "sdk") {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
    const client = new Client(who);
    await client.connect(new StreamableHTTPClientTransport(url, options));
    return client;
  }
  const { Client, StreamableHTTPClientTransport } = await import("@modelcontextprotocol/client");
  const client = new Client(who, { versionNegotiation: NEGOTIATION[mode] });
  await client.connect(new StreamableHTTPClientTransport(url, options));
  return client;
}

const client = await connect();
const call = (name, args) => client.callTool({ name, arguments: args });
const seen = { instructions: client.getInstructions() };
// Listing first makes the client hold every result against the schema that was advertised for it.
seen.tools = (await client.listTools()).tools.map((tool) => tool.name);
const made = await call("vm_create", { request_id: `node-${mode}` });
const vm_id = made.structuredContent.vm_id;
const ran = await call("vm_exec", { vm_id, request_id: `run-${mode}`, command: "echo Grüße 🙂", wait_seconds: 10 });
seen.stdout = ran.structuredContent.stdout;
seen.textIsTheSame = JSON.stringify(JSON.parse(ran.content[0].text)) === JSON.stringify(ran.structuredContent);
const failed = await call("vm_status", { vm_id: "vm-nothing" });
seen.failure = { isError: failed.isError, structured: failed.structuredContent ?? null, ...JSON.parse(failed.content[0].text) };
seen.status = (await call("vm_status", { vm_id })).structuredContent.state;
seen.listed = (await call("vm_list", {})).structuredContent.vms.length;
try {
  await call("vm_nothing", {});
} catch (error) {
  seen.unknownTool = error.code;
}
seen.destroyed = (await call("vm_destroy", { vm_id })).structuredContent.state;
await client.close();
console.log(JSON.stringify(seen));
