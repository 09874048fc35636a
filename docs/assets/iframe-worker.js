// Browsers give no workers to pages opened from disk, and the search runs in one. There, its script runs in a hidden
// frame, which shares the page's origin, and messages are handed over as events. Served pages keep real workers.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = () => resolve(inside);
        inside.document.head.append(script);
      });
      this.frame = frame;
    }

    async postMessage(data) {
      const inside = await this.ready; // what is sent before the script is there waits for it, in order
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
