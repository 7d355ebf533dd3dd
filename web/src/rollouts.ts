// The view of rollouts: the list at #/rollouts, one rollout at #/rollouts/N.
import { ApiError, type View } from "./api";
import { RolloutDetail } from "./rollouts_detail";
import { RolloutList } from "./rollouts_list";

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
        return list.render(root);
      }
      if (!/^\d+$/.test(one)) throw new ApiError(`There is no rollout “${one}”.`);
      detail = new RolloutDetail(ctx, Number(one));
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
