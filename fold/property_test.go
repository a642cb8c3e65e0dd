package fold

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"postrider/internal/record"
)

// history is what a node did: it knows the truth, and what of it was sent.
type history struct {
	t      *rapid.T
	node   string
	epoch  int64
	serial int
	all    []*line         // every branch that ever was, also of lives that a restore undid
	runs   map[string]run1 // this life's
	backup map[string]run1
}

// run1 is a run as a backup holds it.
type run1 struct {
	live *line
	head place
	gens int64
}

// place is a checkpoint.
type place struct{ lsn, event int64 }

type line struct {
	key    record.BranchKey
	gen    int64
	epoch  int64
	parent *line
	fork   place
	events []record.Record
	places []place
}

func (h *history) draw(n int, what string) int { return rapid.IntRange(0, n-1).Draw(h.t, what) }

func (h *history) ulid() string {
	h.serial++
	return fmt.Sprintf("01%04d%020d", h.draw(1000, "ulid"), h.serial)
}

func (h *history) branch(run string, gen int64, parent *line, fork place) *line {
	l := &line{key: record.BranchKey{Tenant: "acme", Run: run, Branch: h.ulid()}, gen: gen, epoch: h.epoch, parent: parent, fork: fork}
	h.all = append(h.all, l)
	return l
}

func (h *history) event(l *line, at place, typ, data string) place {
	next := place{at.lsn + 1, at.lsn + 1}
	l.events = append(l.events, record.Record{
		Node: h.node, Key: l.key, LSN: next.lsn, PrevLSN: at.event, Gen: l.gen, Epoch: l.epoch, Kind: record.Event,
		Type: typ, Data: []byte(data), Occurred: int64(h.serial), Recorded: 1,
	})
	return next
}

func (h *history) open(run string, parent *line, fork place, gens int64) run1 {
	l := h.branch(run, gens+1, parent, fork)
	o := record.BranchOpened{Parent: parent.key.Branch, ForkLSN: fork.lsn, Reason: "x"}
	return run1{l, h.event(l, fork, record.TypeBranchOpened, string(o.AppendData(nil))), gens + 1}
}

func (h *history) step(name string) {
	r, ok := h.runs[name]
	if !ok {
		l := h.branch(name, 1, nil, place{})
		r = run1{l, h.event(l, place{}, record.TypeRunStarted, "null"), 1}
		l.places = append(l.places, r.head)
	}
	for range h.draw(4, "records") {
		if h.draw(3, "kind") == 0 {
			r.head.lsn++ // a command: the fold does not see it
			continue
		}
		h.serial++
		r.head = h.event(r.live, r.head, "counted", fmt.Sprint(h.serial))
	}
	r.live.places = append(r.live.places, r.head)
	h.runs[name] = r
}

// lineage is the pieces of a run, root first, with where each is cut.
func (r run1) lineage() (lines []*line, cuts []int64) {
	cut := r.head.lsn
	for l := r.live; l != nil; l = l.parent {
		lines, cuts = append(lines, l), append(cuts, cut)
		cut = l.fork.lsn
	}
	slices.Reverse(lines)
	slices.Reverse(cuts)
	return lines, cuts
}

func (r run1) events() (list []record.Record) {
	lines, cuts := r.lineage()
	for i, l := range lines {
		for _, e := range l.events {
			if e.LSN <= cuts[i] {
				list = append(list, e)
			}
		}
	}
	return list
}

func (h *history) rewind(name string) {
	r, ok := h.runs[name]
	if !ok {
		return
	}
	lines, cuts := r.lineage()
	i := h.draw(len(lines), "ancestor")
	var places []place
	for _, p := range lines[i].places {
		if p.lsn <= cuts[i] {
			places = append(places, p)
		}
	}
	if len(places) > 0 {
		h.runs[name] = h.open(name, lines[i], places[h.draw(len(places), "step")], r.gens)
	}
}

func (h *history) restore() {
	if len(h.backup) == 0 {
		return
	}
	h.epoch += int64(1 + h.draw(12, "epoch"))
	h.runs = map[string]run1{}
	for _, name := range sortedKeys(h.backup) {
		b := h.backup[name]
		h.runs[name] = h.open(name, b.live, b.head, b.gens)
	}
}

// sent is what was sent of everything: the live lineages whole, of what was undone a part, and a parent's kept prefix
// with each child.
func (h *history) sent() (list []record.Record) {
	upto := map[*line]int64{}
	for _, r := range h.runs {
		upto[r.live] = r.head.lsn
	}
	for _, l := range slices.Backward(h.all) {
		if n := len(l.events); h.draw(3, "undone") > 0 {
			upto[l] = max(upto[l], l.events[h.draw(n, "sent")].LSN)
		}
		if upto[l] > 0 && l.parent != nil {
			upto[l.parent] = max(upto[l.parent], l.fork.lsn)
		}
	}
	for _, l := range h.all {
		for _, e := range l.events {
			if e.LSN <= upto[l] {
				list = append(list, e)
			}
		}
	}
	return list
}

func newHistory(t *rapid.T, node string) *history {
	h := &history{t: t, node: node, epoch: 7, runs: map[string]run1{}}
	for range rapid.IntRange(1, 14).Draw(t, "acts") {
		name := []string{"r1", "r2"}[h.draw(2, "run")]
		switch h.draw(10, "act") {
		case 0, 1:
			h.rewind(name)
		case 2:
			h.restore()
		case 3:
			h.backup = map[string]run1{}
			for k, v := range h.runs {
				h.backup[k] = v
			}
		default:
			h.step(name)
		}
	}
	return h
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// spoil adds marks, puts marks in the place of records, and adds other contents.
func spoil(t *rapid.T, sent []record.Record) (list []record.Record, conflicts map[string]bool) {
	conflicts = map[string]bool{}
	for _, r := range sent {
		what := 9
		if r.Type == "counted" {
			what = rapid.IntRange(0, 20).Draw(t, "spoil")
		}
		switch what {
		case 0:
			list = append(list, mark(r, "poison"))
		case 1:
			list = append(list, mark(r, "poison"), r)
		case 2:
			list = append(list, mark(r, "poison"), mark(r, "lost"))
		case 3:
			list = append(list, r, later(r))
			conflicts[keyOf(r)] = true
		default:
			list = append(list, r)
		}
	}
	return list, conflicts
}

func keyOf(r record.Record) string { return fmt.Sprint(r.Source(), " ", r.LSN) }

// TestOrderNeverMatters: any permutation with duplicates, in batches of any size, with a reopening in between, comes to
// the same as single delivery in order, byte for byte; and that is the history's truth. On the way it is what a small
// model says.
func TestOrderNeverMatters(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		nodes := []*history{newHistory(t, "n1")}
		if rapid.Bool().Draw(t, "second node") {
			nodes = append(nodes, newHistory(t, "n2"))
		}
		var sent []record.Record
		for _, h := range nodes {
			sent = append(sent, h.sent()...)
		}
		list, conflicts := spoil(t, sent)

		inOrder := tempFold(t, dir)
		defer inOrder.remove()
		for _, r := range list {
			inOrder.apply(t, []record.Record{r})
		}
		for _, h := range nodes {
			inOrder.checkTruth(t, h)
		}
		v := verifyRapid(t, inOrder.Fold)
		if v.Gaps != 0 || v.Parked != 0 || v.Conflicts != int64(len(conflicts)) || v.Duplicates != 0 {
			t.Fatalf("in order: %+v, want %d conflicts", v, len(conflicts))
		}

		shuffled := rapid.Permutation(withDuplicates(t, list)).Draw(t, "order")
		f := tempFold(t, dir)
		defer func() { f.remove() }()
		for i := 0; i < len(shuffled); {
			n := rapid.IntRange(1, 12).Draw(t, "batch")
			f.apply(t, shuffled[i:min(i+n, len(shuffled))])
			i += n
			if i < len(shuffled) && rapid.IntRange(0, 9).Draw(t, "look") == 0 {
				checkModel(t, f.Fold, shuffled[:i])
				f.reopen(t)
			}
		}
		checkModel(t, f.Fold, shuffled)
		if got, want := f.dump(t), inOrder.dump(t); got != want {
			t.Fatalf("in order:\n%s\nshuffled:\n%s", want, got)
		}
		if got := verifyRapid(t, f.Fold); got.Duplicates != int64(len(shuffled)-len(list)) {
			t.Fatalf("%d duplicates, want %d", got.Duplicates, len(shuffled)-len(list))
		}
	})
}

func withDuplicates(t *rapid.T, list []record.Record) []record.Record {
	all := slices.Clone(list)
	for range rapid.IntRange(0, len(list)).Draw(t, "duplicates") {
		all = append(all, list[rapid.IntRange(0, len(list)-1).Draw(t, "duplicate")])
	}
	return all
}

// rapidFold is a Fold in its own file.
type rapidFold struct {
	*Fold
	path string
}

func tempFold(t *rapid.T, dir string) *rapidFold {
	file, err := os.CreateTemp(dir, "fold")
	if err != nil {
		t.Fatal(err)
	}
	file.Close()
	f := &rapidFold{path: file.Name()}
	f.open(t)
	return f
}

func (f *rapidFold) open(t *rapid.T) {
	var o Options
	o.Store.Create = true
	var err error
	if f.Fold, err = Open(context.Background(), f.path, o); err != nil {
		t.Fatal(err)
	}
}

func (f *rapidFold) reopen(t *rapid.T) {
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	f.open(t)
}

func (f *rapidFold) remove() {
	f.Close()
	for _, suffix := range []string{"", "-wal", "-shm"} {
		os.Remove(f.path + suffix)
	}
}

func (f *rapidFold) apply(t *rapid.T, list []record.Record) {
	if _, err := f.Apply(context.Background(), arrived(list)); err != nil {
		t.Fatal(err)
	}
}

// dump also has every Show and the Verification.
func (f *rapidFold) dump(t *rapid.T) string {
	var b strings.Builder
	for _, node := range []string{"n1", "n2"} {
		for _, run := range []string{"r1", "r2"} {
			if s, err := f.Show(context.Background(), "acme", run, node); err == nil {
				b.Write(s.AppendJSON(nil))
			}
		}
	}
	v := verifyRapid(t, f.Fold)
	v.Duplicates = 0
	fmt.Fprintf(&b, "%+v\n", v)
	return b.String() + dumpOf(t, f.Fold)
}

func verifyRapid(t *rapid.T, f *Fold) Verification {
	v, err := f.Verify(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return *v
}

// checkTruth: what is shown is the history's own live lineage; a run that a restore has undone is not.
func (f *rapidFold) checkTruth(t *rapid.T, h *history) {
	for _, name := range []string{"r1", "r2"} {
		s, err := f.Show(context.Background(), "acme", name, h.node)
		r, ok := h.runs[name]
		if !ok {
			if err == nil && s.LSN != 0 {
				t.Fatalf("%s of %s is gone, but shown up to %d", name, h.node, s.LSN)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		want := r.events()
		if s.Branch != r.live.key.Branch || len(s.Records) != len(want) {
			t.Fatalf("%s of %s: branch %s, %d records; want %s, %d", name, h.node, s.Branch, len(s.Records), r.live.key.Branch, len(want))
		}
		for i, e := range want {
			got := s.Records[i]
			if got.Branch != e.Key.Branch || got.LSN != e.LSN {
				t.Fatalf("%s record %d: %s %d, want %s %d", name, i, got.Branch, got.LSN, e.Key.Branch, e.LSN)
			}
		}
	}
}

// What follows is the fold rule once more, from what was delivered, as plainly as possible.

type modelBranch struct {
	ulid       string
	epoch, gen int64
	known      bool
	parent     string
	fork       int64
	opening    string // order of the opening that counts
	keys       map[int64][]record.Record
}

func (b *modelBranch) rank(o *modelBranch) int {
	return cmp.Or(cmp.Compare(b.epoch, o.epoch), cmp.Compare(b.gen, o.gen), cmp.Compare(b.ulid, o.ulid))
}

// shown is what stands first under a key.
func shown(list []record.Record) record.Record {
	return slices.MinFunc(list, func(a, b record.Record) int {
		ha, hb := record.ContentHash(&a), record.ContentHash(&b)
		return cmp.Or(cmp.Compare(bit(a.IsMark()), bit(b.IsMark())), bytes.Compare(ha[:], hb[:]), cmp.Compare(a.PrevLSN, b.PrevLSN))
	})
}

func checkModel(t *rapid.T, f *Fold, delivered []record.Record) {
	type runKey struct{ node, run string }
	epochs := map[string]int64{}
	runs := map[runKey]map[string]*modelBranch{}
	total, conflicts := 0, 0
	for _, r := range delivered {
		epochs[r.Node] = max(epochs[r.Node], r.Epoch)
		k := runKey{r.Node, r.Key.Run}
		if runs[k] == nil {
			runs[k] = map[string]*modelBranch{}
		}
		b := runs[k][r.Key.Branch]
		if b == nil {
			b = &modelBranch{ulid: r.Key.Branch, keys: map[int64][]record.Record{}}
			runs[k][r.Key.Branch] = b
		}
		b.epoch, b.gen = max(b.epoch, r.Epoch), max(b.gen, r.Gen)
		b.known = b.known || r.LSN == 1
		if r.Type == record.TypeBranchOpened {
			o, err := record.ParseBranchOpened(r.Data)
			if err != nil {
				t.Fatal(err)
			}
			hash := record.ContentHash(&r)
			if order := fmt.Sprintf("%020d%x", r.LSN, hash); b.opening == "" || order < b.opening {
				b.known, b.parent, b.fork, b.opening = true, o.Parent, o.ForkLSN, order
			}
		}
		if !slices.ContainsFunc(b.keys[r.LSN], func(o record.Record) bool { return bytes.Equal(o.Data, r.Data) && o.Type == r.Type }) {
			b.keys[r.LSN] = append(b.keys[r.LSN], r)
		}
	}
	var gaps, parked, showing int
	for k, branches := range runs {
		var live *modelBranch
		for _, b := range branches {
			if b.known && b.epoch == epochs[k.node] && (live == nil || b.rank(live) > 0) {
				live = b
			}
			total += len(b.keys)
			for _, list := range b.keys {
				records := 0
				for _, r := range list {
					records += int(1 - bit(r.IsMark()))
				}
				if records > 1 {
					conflicts++
				}
			}
		}
		var want []string // branch and LSN of what is shown
		if live != nil {
			var events []record.Record
			cut := int64(1 << 62)
			for b := live; b != nil; b = branches[b.parent] {
				for lsn, list := range b.keys {
					if lsn > b.fork && lsn <= cut {
						events = append(events, shown(list))
					}
				}
				cut = min(cut, b.fork)
			}
			slices.SortFunc(events, func(a, b record.Record) int { return cmp.Compare(a.LSN, b.LSN) })
			last, whole := int64(0), true
			for _, e := range events {
				if e.PrevLSN != last {
					gaps++
					whole = false
				}
				if last = e.LSN; whole {
					want = append(want, fmt.Sprint(e.Key.Branch, e.LSN, e.Type, string(e.Data)))
				} else {
					parked++
				}
			}
		}
		for _, b := range branches {
			if !b.known && b.epoch == epochs[k.node] && (live == nil || b.rank(live) > 0) {
				last := int64(-1)
				for _, lsn := range slices.Sorted(func(yield func(int64) bool) {
					for lsn := range b.keys {
						if !yield(lsn) {
							return
						}
					}
				}) {
					if shown(b.keys[lsn]).PrevLSN != last {
						gaps++
					}
					last = lsn
					parked++
				}
			}
		}
		showing += len(want)
		s, err := f.Show(context.Background(), "acme", k.run, k.node)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, r := range s.Records {
			got = append(got, fmt.Sprint(r.Branch, r.LSN, r.Type, string(r.Data)))
		}
		if !slices.Equal(got, want) {
			t.Fatalf("run %s of %s shows\n%q, the model says\n%q", k.run, k.node, got, want)
		}
	}
	v := verifyRapid(t, f)
	want := Verification{
		Runs: int64(len(runs)), Records: int64(total), Duplicates: v.Duplicates, Gaps: int64(gaps), Parked: int64(parked),
		Conflicts: int64(conflicts), Abandoned: int64(total - parked - showing), Findings: v.Findings,
	}
	if fmt.Sprint(v) != fmt.Sprint(want) {
		t.Fatalf("verify says\n%+v, the model\n%+v", v, want)
	}
	// The views that people read say the same as Verify, which counts in cheaper ways.
	var inParked, inAbandoned int64
	err := f.store.Reader().QueryRow("SELECT (SELECT count(*) FROM parked), (SELECT count(*) FROM abandoned)").Scan(&inParked, &inAbandoned)
	if err != nil || inParked != v.Parked || inAbandoned != v.Abandoned {
		t.Fatalf("the views have %d parked, %d abandoned (%v), verify says %+v", inParked, inAbandoned, err, v)
	}
}
