// The view of rollouts: the list at #/rollouts, one rollout at #/rollouts/N.
import { ApiError, type View } from "./api";
import { RolloutDetail } from "./rollouts_detail";
import { RolloutList } from "./rollouts_list";

/** The rollout that was open last: going back to the list goes back to its row. */
let opened: number | null = null;

export default function view(): View {
  let list: RolloutList | null = null;
  let detail: RolloutDetail | null = null;
  let run = 0;
  return {
    async render(root, ctx) {
      run = ctx.run;
      const one = ctx.parts[0];
      if (one === undefined || one === "") {
        list = new RolloutList(ctx);
        await list.render(root);
        if (opened !== null) list.focus(opened);
        opened = null;
        return;
      }
      if (!/^\d+$/.test(one)) throw new ApiError(`There is no rollout “${one}”.`);
      opened = Number(one);
      detail = new RolloutDetail(ctx, opened);
      return detail.render(root);
    },
    onChange(changed) {
      if (changed.rollouts && changed.run === run) void list?.load().catch(() => undefined); // the header says that the server is lost
    },
    dispose() {
      detail?.dispose();
    },
  };
}
