// Builds the page into the package: `node build.mjs [FOLDER]`. The same sources give the same bytes.
import { build } from "esbuild";
import { copyFileSync, mkdirSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "..", "torchtitan_rl", "page", "static");
mkdirSync(out, { recursive: true });
const license = readFileSync(join(here, "node_modules", "uplot", "LICENSE"), "utf8");
await build({
  absWorkingDir: here,
  entryPoints: ["src/app.ts", "css/app.css"],
  outdir: out,
  entryNames: "[name]",
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome123", "firefox128", "safari17.5"],
  charset: "utf8",
  legalComments: "none",
  banner: { js: `/*! Contains uPlot (https://github.com/leeoniya/uPlot).\n${license.trim()}\n*/` },
  logLevel: "warning",
});
copyFileSync(join(here, "index.html"), join(out, "index.html"));
