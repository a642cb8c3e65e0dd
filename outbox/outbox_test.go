package outbox

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

func TestAppendRollsBackWithItsStep(t *testing.T) {
	b := newBox(t)
	branch := b.root("t")
	b.fill(branch, 2)
	refused := errors.New("the step fails after its records")
	err := b.store.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		if _, err := b.append(ctx, tx, branch, []record.Record{event("1"), event("2")}); err != nil {
			return err
		}
		return refused
	})
	if !errors.Is(err, refused) {
		t.Fatalf("err = %v", err)
	}
	if n := b.number("SELECT count(*) FROM outbox"); n != 2 {
		t.Errorf("%d records are there, want the 2 of the step before", n)
	}
	b.add(branch, event("3"))
	if got := lsns(b.drainAll(new(Cursor), 100), branch); !slices.Equal(got, []int64{1, 2, 3}) {
		t.Errorf("LSNs %v, want 1 2 3: the rolled back ones come back", got)
	}
}

func TestAppendGivesDenseLSNsAndLinksEvents(t *testing.T) {
	b := newBox(t)
	branch := b.root("t")
	b.add(branch, event1("first"))
	b.add(branch, message("lamp/set"), event("22"), command("r9"), message("lamp/set"), event("333"), event("4444"))
	b.add(branch, event("5"))

	items := b.drainAll(new(Cursor), 100)
	if got := lsns(items, branch); !slices.Equal(got, upTo(1, 8)) {
		t.Fatalf("LSNs %v", got)
	}
	wantPrev := []int64{0, 1, 1, 3, 3, 3, 6, 7} // messages and commands are no link of the chain
	total := int64(0)
	for i, it := range items {
		if it.PrevLSN != wantPrev[i] {
			t.Errorf("record %d has prevlsn %d, want %d", it.LSN, it.PrevLSN, wantPrev[i])
		}
		if total += size(&it.Record); it.Bytes != total {
			t.Errorf("record %d has cumulative bytes %d, want %d", it.LSN, it.Bytes, total)
		}
	}
	if it := items[3]; it.ToNode != "n2" || it.ToAgent != "b" || it.ToRun != "r9" || it.InputID != "pr:x" || it.Hops != 1 || it.Kind != record.Command {
		t.Errorf("command came back as %+v", it)
	}
	if it := items[1]; it.Topic != "lamp/set" || !bytes.Equal(it.Data, []byte{0xff}) || it.Kind != record.Message {
		t.Errorf("message came back as %+v", it)
	}
	if h := b.heads[branch]; h.LSN != 8 || h.EventLSN != 8 || h.Bytes != total {
		t.Errorf("head %+v, want LSN 8, event LSN 8, bytes %d", h, total)
	}
	child := b.rewind(branch, 5)
	if it := b.drainAll(new(Cursor), 100)[5]; it.Branch != child || it.LSN != 6 || it.PrevLSN != 3 {
		t.Errorf("first record of the child: %d after %d on branch %d, want 6 after 3: prevlsn goes across the fork", it.LSN, it.PrevLSN, it.Branch)
	}
}

func TestAppendKeepsEveryFieldAndByte(t *testing.T) {
	b := newBox(t)
	branch := b.root("t")
	want := record.Record{Kind: record.Message, Topic: "a/b", Retain: true, Data: []byte(" {\"a\":1.0,\"a\":-0.0}\n"), Occurred: 42,
		Correlation: "c", Causation: "d", Trace: "e", Expires: 99_000}
	b.add(branch, want)
	b.add(branch, record.Record{Kind: record.Event, Type: "x", Subject: "s", Occurred: 7})
	items := b.drainAll(new(Cursor), 10)
	got := items[0].Record
	if got.Recorded == 0 || got.Node != "n1" || got.Key.Tenant != "t" || got.Key.Run != "r0" || got.Gen != 1 || got.Epoch != 1 || got.Step != 1 {
		t.Errorf("identity %+v", got)
	}
	if got.Topic != want.Topic || got.Retain != want.Retain || !bytes.Equal(got.Data, want.Data) || got.Occurred != 42 ||
		got.Correlation != "c" || got.Causation != "d" || got.Trace != "e" || got.Expires != 99_000 {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := items[1].Record; got.Subject != "s" || len(got.Data) != 0 {
		t.Errorf("nil data came back as %v, subject %q", got.Data, got.Subject)
	}
}

func TestAckNeverMovesBack(t *testing.T) {
	b := newBox(t)
	branch := b.root("t")
	b.fill(branch, 10)
	fence := b.lease()
	items := b.drain(new(Cursor), 10)
	ack := func(n int) {
		t.Helper()
		if err := b.Ack(t.Context(), fence, []Shipped{shippedUpTo(items[n-1])}); err != nil {
			t.Fatal(err)
		}
	}
	ack(7)
	ack(3)
	ack(7)
	if n := b.number("SELECT shipped FROM branch WHERE id = ?", branch); n != 7 {
		t.Errorf("shipped %d, want 7", n)
	}
	if n := b.number("SELECT count(*) FROM ship_log"); n != 1 {
		t.Errorf("%d rows in ship_log, want 1: what moves nothing was shipped before", n)
	}
	if upto, at := b.number("SELECT upto FROM ship_log"), b.number("SELECT at_us FROM ship_log"); upto != 7 || at == 0 {
		t.Errorf("ship_log says up to %d at %d", upto, at)
	}
	if got := lsns(b.drainAll(new(Cursor), 100), branch); !slices.Equal(got, upTo(8, 10)) {
		t.Errorf("a new session drains %v, want 8 to 10", got)
	}
}

func TestAckBeyondTheHeadChangesNothing(t *testing.T) {
	b := newBox(t)
	branch := b.root("t")
	b.fill(branch, 3)
	if err := b.Ack(t.Context(), b.lease(), []Shipped{{Branch: branch, LSN: 4}, {Branch: 999, LSN: 1}}); err != nil {
		t.Fatal(err)
	}
	if n := b.number("SELECT shipped FROM branch"); n != 0 {
		t.Errorf("shipped %d, want 0", n)
	}
	if n := b.number("SELECT count(*) FROM ship_log"); n != 0 {
		t.Errorf("%d rows in ship_log", n)
	}
}

func TestAckBeyondExportableOfAnAbandonedBranchIsAccepted(t *testing.T) {
	b := newBox(t)
	branch := b.root("t")
	b.fill(branch, 10)
	items := b.drain(new(Cursor), 10)
	b.rewind(branch, 4)
	if err := b.Ack(t.Context(), b.lease(), []Shipped{shippedUpTo(items[6])}); err != nil {
		t.Fatal(err)
	}
	if n := b.number("SELECT shipped FROM branch WHERE id = ?", branch); n != 7 {
		t.Errorf("shipped %d, want 7", n)
	}
	s, err := b.Stats(t.Context(), "t")
	if err != nil {
		t.Fatal(err)
	}
	if s.Shipped != 7 || s.Withheld != 3 || s.Pending != 1 {
		t.Errorf("stats %+v, want 7 shipped, 3 withheld, 1 pending (branch.opened)", s)
	}
}

func TestAckUnderAnOlderLeaseChangesNothing(t *testing.T) {
	b := newBox(t)
	one, two := b.root("t"), b.root("t")
	b.fill(one, 3)
	b.fill(two, 3)
	old := b.lease()
	items := b.drain(new(Cursor), 100)
	newer := b.lease()
	if newer <= old {
		t.Fatalf("fences %d, %d", old, newer)
	}
	var marks []Shipped
	for _, it := range items {
		marks = append(marks, shippedUpTo(it))
	}
	if err := b.Ack(t.Context(), old, marks); !errors.Is(err, ErrFenced) {
		t.Errorf("ack under the older lease: %v, want ErrFenced", err)
	}
	if err := b.Failed(t.Context(), old, []int64{one}, "x", time.Now()); !errors.Is(err, ErrFenced) {
		t.Errorf("failed under the older lease: %v, want ErrFenced", err)
	}
	if err := b.Connected(t.Context(), old); !errors.Is(err, ErrFenced) {
		t.Errorf("connected under the older lease: %v, want ErrFenced", err)
	}
	if n := b.number("SELECT sum(shipped) + sum(deliveries) FROM branch") + b.number("SELECT count(*) FROM ship_log"); n != 0 {
		t.Errorf("something was changed")
	}
	if err := b.Ack(t.Context(), newer, marks); err != nil {
		t.Fatal(err)
	}
	if n := b.number("SELECT sum(shipped) FROM branch"); n != 6 {
		t.Errorf("shipped %d, want 6", n)
	}
}

func TestFailedAckRedelivers(t *testing.T) {
	b := newBox(t)
	branch := b.root("t")
	b.fill(branch, 5)
	fence := b.lease()
	c := new(Cursor)
	items := b.drain(c, 100)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.Ack(ctx, fence, []Shipped{shippedUpTo(items[4])}); err == nil {
		t.Fatal("an ack on a context that has ended went through")
	}
	if more := b.drain(c, 100); len(more) != 0 {
		t.Errorf("the same session hands out %d records again", len(more))
	}
	if got := lsns(b.drainAll(new(Cursor), 100), branch); !slices.Equal(got, upTo(1, 5)) {
		t.Errorf("the next session drains %v, want all", got)
	}
}

func TestFailedSessionIsRecordedAndNotHeldAgainstRecords(t *testing.T) {
	b := newBox(t)
	waiting, empty := b.root("t"), b.root("t")
	b.fill(waiting, 2)
	fence := b.lease()
	for range 3 {
		if err := b.Failed(t.Context(), fence, []int64{waiting, empty}, "refused", time.UnixMicro(77)); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.number("SELECT deliveries FROM branch WHERE id = ? AND attempts = 0 AND attempt_us > 0 AND last_error = 'refused' AND hold_us IS NULL", waiting); n != 3 {
		t.Errorf("%d deliveries, want 3", n)
	}
	if n := b.number("SELECT deliveries FROM branch WHERE id = ?", empty); n != 0 {
		t.Errorf("a branch without backlog has %d deliveries", n)
	}
	if n := b.number("SELECT next_us FROM relay_lease WHERE last_error = 'refused'"); n != 77 {
		t.Errorf("next try %d, want 77", n)
	}
	if err := b.Connected(t.Context(), fence); err != nil {
		t.Fatal(err)
	}
	if n := b.number("SELECT count(*) FROM relay_lease WHERE last_error IS NULL AND next_us IS NULL"); n != 1 {
		t.Error("the lease still says why the last session ended")
	}
	items := b.drain(new(Cursor), 1)
	if err := b.Ack(t.Context(), fence, []Shipped{shippedUpTo(items[0])}); err != nil {
		t.Fatal(err)
	}
	if n := b.number("SELECT deliveries FROM branch WHERE id = ? AND last_error IS NULL AND attempt_us IS NULL", waiting); n != 0 {
		t.Errorf("%d deliveries after an ack: the next record is another one", n)
	}
}

func TestWatchSeesARewindOfAnotherProcess(t *testing.T) {
	b := newBox(t)
	branch := b.root("t")
	b.fill(branch, 3)
	w, err := b.Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}()
	rewound := func() bool {
		t.Helper()
		moved, err := w.Rewound(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return moved
	}
	if rewound() {
		t.Error("a rewind is reported and there was none")
	}
	b.fill(branch, 3)
	if rewound() {
		t.Error("a step is reported as a rewind")
	}
	b.rewind(branch, 2)
	if !rewound() {
		t.Error("a rewind of the same process is not seen")
	}
	if rewound() {
		t.Error("one rewind is reported twice")
	}
	other := &box{t: t, store: openStore(t, b.path), heads: b.heads, n: b.n}
	other.fill(branch, 1)
	if rewound() {
		t.Error("another process's step is reported as a rewind")
	}
	other.rewind(branch, 1)
	other.fill(branch, 1)
	if !rewound() {
		t.Error("a rewind of another process is not seen")
	}
	// Without a commit, only the version is read: the other statement is not even usable.
	if err := w.rewinds.Close(); err != nil {
		t.Fatal(err)
	}
	if rewound() {
		t.Error("a rewind is reported and there was none")
	}
	b.fill(branch, 1)
	if _, err := w.Rewound(t.Context()); err == nil {
		t.Error("after a commit the counter was not read")
	}
}
