// Browsers start no workers for pages that are opened from a folder. There, the search's worker runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      const give = (target, data) => {
        const event = new MessageEvent("message", { data })
        target.dispatchEvent(event)
        if (target === this) this.onmessage?.(event)
      }
      inside.postMessage = (data) => setTimeout(() => give(this, data))
      const script = inside.document.createElement("script")
      const loaded = new Promise((resolve) => script.addEventListener("load", resolve))
      script.addEventListener("error", (event) => this.onerror?.(event))
      this.postMessage = (data) => loaded.then(() => give(inside, data))
      script.src = url
      inside.document.body.append(script)
    }

    terminate() {
      this.frame.remove()
    }
  }
}
