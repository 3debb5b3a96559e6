// Numbers as people read them. What is not known is "unavailable", never 0.

export const UNAVAILABLE = "unavailable";
const known = (value) => value !== null && value !== undefined;

export function count(value) {
  if (!known(value)) return UNAVAILABLE;
  if (Math.abs(value) >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (Math.abs(value) >= 1e5) return `${(value / 1e3).toFixed(0)} k`;
  return Math.round(value).toLocaleString("en");
}

export const percent = (ratio) => known(ratio) ? `${(ratio * 100).toFixed(ratio < 0.1 && ratio > 0 ? 1 : 0)} %` : UNAVAILABLE;
export const ms = (value) => !known(value) ? UNAVAILABLE : value >= 10000 ? `${(value / 1000).toFixed(1)} s` : value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`;
export const bytes = (value) => known(value) ? `${count(value)}B` : UNAVAILABLE;

export function age(seconds) {
  if (!known(seconds)) return UNAVAILABLE;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

export const ratio = (part, whole) => known(part) && whole ? part / whole : null;
