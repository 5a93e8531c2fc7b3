// Runs the engine of Perfetto's page, a web worker, in a process: RPC messages on standard input, answers on output.
const fs = require("fs"), path = require("path");
const folder = process.argv[2];
const note = (...texts) => process.stderr.write(texts.join(" ").slice(0, 1000) + "\n");

globalThis.WorkerGlobalScope = Object;  // by which the engine knows where it is
class XMLHttpRequest {
  open(method, name) { this.response = fs.readFileSync(path.join(folder, path.basename(name))); }
  send() {}
}
const worker = {location: {href: "http://localhost/"}};
const source = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
new Function("self", "process", "XMLHttpRequest", "console", source)(
  worker, undefined, XMLHttpRequest, {log: note, warn: note, error: note});

const port = {postMessage: bytes => fs.writeSync(1, bytes)};
worker.onmessage({data: port});
setImmediate(() => port.onmessage({data: new Uint8Array(fs.readFileSync(0))}));
