import type { View } from "./api";
import { empty } from "./dom";

export default function view(): View {
  return {
    render(root) {
      root.append(empty("Not built yet", "This view comes soon."));
    },
  };
}
