// The past as columns of numbers over a window of time, newest value last. NaN is a gap.

const FORGET_EVERY = 60; // rows
const LEAST_S = 60;

export class History {
  /** A window of `span` seconds with one value every `step`. */
  constructor(span, step) {
    this.step = step;
    this.size = Math.ceil(span / step);
    this.last = -1; // the second of the newest value, on the proxy's clock
    this.first = Infinity; // the second of the oldest value
    this.columns = new Map();
  }

  static fromAnswer(answer, span) {
    const made = new History(span, answer.step_s);
    made.last = answer.from_s + (answer.rows - 1) * answer.step_s;
    made.first = answer.from_s;
    const rows = Math.min(answer.rows, made.size);
    for (const name of answer.names) {
      made.column(name).set(answer.column(name).subarray(answer.rows - rows), made.size - rows);
    }
    return made;
  }

  column(name) {
    let found = this.columns.get(name);
    if (found === undefined) {
      found = new Float32Array(this.size).fill(NaN);
      this.columns.set(name, found);
    }
    return found;
  }

  get(name) {
    return this.columns.get(name);
  }

  /** The newest value of a column. */
  newest(name) {
    return this.columns.get(name)?.[this.size - 1] ?? NaN;
  }

  /** Adds the row of a second; seconds in between are gaps. */
  append(second, row, wanted) {
    const passed = Math.min(this.size, second - this.last);
    if (passed <= 0) return;
    for (const column of this.columns.values()) {
      column.copyWithin(0, passed);
      column.fill(NaN, this.size - passed);
    }
    for (const [name, value] of Object.entries(row)) {
      if (wanted(name)) this.column(name)[this.size - 1] = value;
    }
    this.last = second;
    this.first = Math.min(this.first, second);
    if (second % FORGET_EVERY === 0) this.forget();
  }

  /** Drops columns without any value, such as those of flows that are gone. */
  forget() {
    for (const [name, column] of this.columns) if (column.every(Number.isNaN)) this.columns.delete(name);
  }

  /** The Unix time at the end of the newest value. */
  end(offset) {
    return this.last + this.step + offset;
  }

  /** The Unix time at the end of each value. `offset` is Unix time minus the proxy's clock. */
  times(offset) {
    const first = this.end(offset) - (this.size - 1) * this.step;
    return Float64Array.from({ length: this.size }, (_, at) => first + at * this.step);
  }

  /** The window of time to show: the whole span, or less for a young proxy, but at least a minute. */
  window(offset) {
    const whole = (this.size - 1) * this.step;
    const known = Math.max(LEAST_S, this.last - this.first);
    return [this.end(offset) - Math.min(whole, known), this.end(offset)];
  }

  /** The part between `prefix` and `suffix` of all columns that have both, for example the names of backends. */
  names(prefix, suffix) {
    return [...this.columns.keys()]
      .filter((name) => name.startsWith(prefix) && name.endsWith(suffix) && name.length > prefix.length + suffix.length)
      .map((name) => name.slice(prefix.length, name.length - suffix.length));
  }
}
