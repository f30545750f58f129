// Browsers start no worker in pages that were opened as files. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  // As between threads: a copy, and not before the sender is done.
  const later = (data, receive) => {
    const event = new MessageEvent("message", { data: structuredClone(data) });
    setTimeout(() => receive(event));
  };

  window.Worker = class {
    constructor(url) {
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => later(data, (event) => this.onmessage?.(event));
      const script = inner.document.createElement("script");
      script.src = new URL(url, document.baseURI);
      script.onload = () => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.deliver(data));
      };
      script.onerror = () => this.onerror?.(new ErrorEvent("error", { cancelable: true, message: "search" }));
      inner.document.body.append(script);
    }

    postMessage(data) {
      if (this.ready) this.deliver(data);
      else this.waiting.push(data);
    }

    deliver(data) {
      later(data, (event) => this.frame.contentWindow?.dispatchEvent(event));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
