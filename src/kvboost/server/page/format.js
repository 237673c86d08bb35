// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const ONE = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const count = (n) => WHOLE.format(n);

export const tokens = (n) => `${count(n)} ${n === 1 ? "token" : "tokens"}`;

export const percent = (share) => `${Math.floor(share * 100 + 1e-9)}%`; // 99.6% is not all of it

/** Tokens per second: one decimal below 100. */
export const rate = (n) => (n < 100 ? ONE : WHOLE).format(n);

/** Milliseconds as "0 ms", "0.4 ms", "12 ms", "0.12 s", "1.2 s" or "34 s". */
export function time(ms) {
  if (ms === 0) return "0 ms";
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 49.5) return `${Math.round(ms)} ms`;
  if (ms < 995) return `${(ms / 1000).toFixed(2)} s`;
  if (ms < 9950) return `${(ms / 1000).toFixed(1)} s`;
  return `${count(ms / 1000)} s`;
}

/** Bytes in binary units. */
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${n < 10 && i > 0 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}
