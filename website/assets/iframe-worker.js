/* Search from a page that is opened as a file: browsers start no worker from file:, so its script runs in a frame. */
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = frame.contentWindow
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const load = source => new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        Object.assign(script, { src: source, onload: resolve, onerror: reject })
        inner.document.body.append(script)
      })
      inner.importScripts = (...sources) => sources.reduce((last, source) => last.then(() => load(source)), Promise.resolve())
      this.inner = inner
      this.loaded = load(new URL(url, location.href).href)
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }

    set onmessage(listener) { this.addEventListener("message", listener) }

    terminate() {}
  }
  window.IFrameWorker = window.Worker = IFrameWorker
}
