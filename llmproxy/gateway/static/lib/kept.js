// What the browser keeps for the page. Where it denies that, the page keeps it until it is closed.

/** Texts by name; an empty one is forgotten. */
function keeper(kind) {
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

export const inBrowser = keeper("localStorage");
export const inTab = keeper("sessionStorage");
