// Values that the browser stores for the page. If it denies storage, they live until the page is closed.

/** Texts by name in a storage of the browser. Setting an empty text deletes it. */
function storage(kind) {
  const own = new Map();
  const tried = (act) => {
    try {
      return act(window[kind]);
    } catch {
      return null;
    }
  };
  return {
    get: (name) => own.get(name) ?? tried((store) => store.getItem(name)) ?? "",
    set: (name, value) => {
      own.set(name, value);
      tried((store) => (value ? store.setItem(name, value) : store.removeItem(name)));
    },
  };
}

export const inBrowser = storage("localStorage");
export const inTab = storage("sessionStorage");
