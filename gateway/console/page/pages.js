// One page of a list at a time: what was shown before is let go, only where pages begin is remembered, and not forever.

import { useEffect, useRef, useState } from "./htm-preact.js";

const BACK_MAX = 500;
const AT_ONCE = 4;

// Act on each item, a few at a time; an act that returns false stops those that have not begun.
export async function each(items, act) {
  const left = [...items];
  const work = async () => {
    while (left.length) if ((await act(left.shift())) === false) left.length = 0;
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
}

// `load(after, signal)` gives { data, has_more, last_id }; another `what` begins again.
export function usePages(what, load) {
  const [page, setPage] = useState({ data: null, hasMore: false, error: null, isLoading: true });
  const place = useRef({ after: "", back: [], number: 1 });
  const running = useRef(null);

  async function show(at) {
    running.current?.abort();
    const abort = (running.current = new AbortController());
    setPage((shown) => ({ ...shown, isLoading: true }));
    try {
      const found = await load(at.after, abort.signal);
      place.current = at;
      setPage({ data: found.data, hasMore: found.has_more, lastId: found.last_id, extra: found, error: null, isLoading: false });
    } catch (error) {
      if (!abort.signal.aborted) setPage((shown) => ({ ...shown, error, isLoading: false }));
    }
  }

  useEffect(() => {
    setPage({ data: null, hasMore: false, error: null, isLoading: true });
    show({ after: "", back: [], number: 1 });
    return () => running.current?.abort();
  }, [what]);

  const { after, back, number } = place.current;
  return {
    ...page,
    number,
    reload: () => show(place.current),
    first: number > 1 ? () => show({ after: "", back: [], number: 1 }) : null,
    previous: back.length ? () => show({ after: back.at(-1), back: back.slice(0, -1), number: number - 1 }) : null,
    next: page.hasMore
      ? () => show({ after: page.lastId, back: [...back, after].slice(-BACK_MAX), number: number + 1 })
      : null,
  };
}
