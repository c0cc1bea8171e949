// Search in pages that are opened as files: browsers start no worker there, so its script runs in a
// hidden frame. Material for MkDocs looks for the name `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<!doctype html><title>Worker</title>"
      this.ready = new Promise((resolve) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow
          inside.postMessage = (data) =>
            this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = url
          script.onload = () => resolve(inside)
          inside.document.head.append(script)
        }
      })
      document.documentElement.append(this.frame)
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
