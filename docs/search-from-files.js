// Browsers start no worker in pages that were opened as files. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => setTimeout(() => this.onmessage?.(new MessageEvent("message", { data })));
      const script = inner.document.createElement("script");
      script.src = new URL(url, document.baseURI);
      script.onload = () => this.waiting.splice(0).forEach((data) => this.deliver(data));
      script.onerror = () => this.onerror?.(new ErrorEvent("error", { cancelable: true, message: "search" }));
      this.loaded = new Promise((done) => script.addEventListener("load", done));
      this.loaded.then(() => (this.ready = true));
      inner.document.body.append(script);
    }

    postMessage(data) {
      if (this.ready) this.deliver(data);
      else this.waiting.push(data);
    }

    deliver(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
