// Formats numbers and times, the same way in all views.

const counts = new Intl.NumberFormat("en");
const NOTHING = "–";

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export function count(value) {
  return missing(value) ? NOTHING : counts.format(Math.round(value));
}

/** A rate or another number. Fractions have two digits after the point; one from 10 and none from 100 on. */
export function number(value) {
  if (missing(value)) return NOTHING;
  const size = Math.abs(value);
  return size >= 100 || Number.isInteger(value) ? counts.format(Math.round(value)) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function percent(share) {
  return missing(share) ? NOTHING : `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}

export function duration(seconds) {
  if (missing(seconds)) return NOTHING;
  const sign = seconds < 0 ? "−" : "";
  const size = Math.abs(seconds);
  if (size < 0.9995) return `${sign}${Math.round(size * 1000)} ms`;
  if (size < 99.95) return `${sign}${size.toFixed(size < 9.995 ? 2 : 1)} s`;
  // Keeps a digit after the point: 100 s are not 2 min.
  if (size < 570) return `${sign}${Number((size / 60).toFixed(1))} min`;
  if (size < 5970) return `${sign}${Math.round(size / 60)} min`;
  if (size < 172800) return `${sign}${Math.round(size / 3600)} h`;
  return `${sign}${Math.round(size / 86400)} d`;
}

/** How much slower than the pool: 1 is equal. */
export function factor(value) {
  if (missing(value)) return NOTHING;
  if (Math.abs(value - 1) < 0.05) return "as the pool";
  return value > 1 ? `${value.toFixed(1)}x slower` : `${(1 / value).toFixed(1)}x faster`;
}

/** The local time of day of a Unix time. */
export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

export function plural(value, what) {
  return `${count(value)} ${what}${Math.round(value) === 1 ? "" : "s"}`;
}
