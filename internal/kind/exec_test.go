package kind

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"postrider/internal/agent"
)

const patience = 20 * time.Second // for what must happen; nothing waits that long when it does

var when = time.Date(2026, 2, 3, 4, 5, 6, 7_000, time.UTC)

func step(input string) agent.Step {
	return agent.Step{
		Tenant: "t", Run: "r", Branch: "b", Agent: "a", Number: 1, Attempt: 1, Now: when, Deadline: when.Add(time.Minute),
		State: json.RawMessage("null"),
		Input: &agent.Input{ID: input, Type: "in", Data: json.RawMessage(`{}`), At: when, Source: "cli"},
	}
}

func odd(mode ...string) string {
	command := "exec sh ../../testdata/agents/odd.sh"
	for _, m := range mode {
		command += " '" + m + "'"
	}
	return command
}

// host is an Exec under test, with its log.
type host struct {
	*Exec
	t   *testing.T
	log *logLines
}

func newHost(t *testing.T, command string, o ExecOptions) *host {
	t.Helper()
	h := &host{t: t, log: &logLines{more: make(chan struct{}, 1)}}
	if o.Procs == 0 {
		o.Procs = 1
	}
	o.Logger = slog.New(slog.NewTextHandler(h.log, nil))
	h.Exec = NewExec("a", command, o)
	t.Cleanup(func() { _ = h.Close(t.Context()) }) // t's context is over by then: no grace
	return h
}

func (h *host) step(input string) (agent.Effects, error) { return h.Step(h.t.Context(), step(input)) }

// pid has one step decided by an agent that answers with its process id.
func (h *host) pid(input string) int {
	h.t.Helper()
	eff, err := h.step(input)
	if err != nil {
		h.t.Fatal(err)
	}
	pid, err := strconv.Atoi(string(eff.Events[0].Data))
	if err != nil {
		h.t.Fatal(err)
	}
	return pid
}

// fails has one step fail, with an error that contains every want.
func (h *host) fails(input string, want ...string) {
	h.t.Helper()
	eff, err := h.step(input)
	checkError(h.t, err, append(want, "agent a, step t/r/b/1/"+input+": ")...)
	if eff.State != nil || eff.Events != nil {
		h.t.Errorf("effects beside an error: %+v", eff)
	}
}

func checkError(t *testing.T, err error, want ...string) {
	t.Helper()
	for _, w := range want {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("error %v\ndoes not contain %s", err, w)
		}
	}
}

type logLines struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{}
}

func (l *logLines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case l.more <- struct{}{}:
	default:
	}
	return l.text.Write(b)
}

func (l *logLines) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), s)
}

func (l *logLines) all() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *logLines) wait(t *testing.T, s string, n int) {
	t.Helper()
	for deadline := time.After(patience); l.count(s) < n; {
		select {
		case <-l.more:
		case <-deadline:
			t.Fatalf("the log does not have %q %d times:\n%s", s, n, l.text.String())
		}
	}
}

// holder is a fifo that an agent and all it starts keep open.
type holder struct {
	t    *testing.T
	path string
	r    *os.File
}

func newHolder(t *testing.T) holder {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hold")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return holder{t, path, r}
}

// nobodyLeft fails unless everybody who held the fifo is dead. Somebody must have held it.
func (h holder) nobodyLeft() {
	h.t.Helper()
	if err := h.r.SetReadDeadline(time.Now().Add(patience)); err != nil {
		h.t.Fatal(err)
	}
	if b, err := io.ReadAll(h.r); err != nil || !strings.HasPrefix(string(b), "held\n") {
		h.t.Errorf("read %q, %v from the fifo: somebody is left, or nobody was there", b, err)
	}
}

func TestCounterCountsAcrossStepsInOneProcess(t *testing.T) {
	h := newHost(t, "exec sh ../../testdata/agents/counter.sh", ExecOptions{})
	testCounter(t, h)
	if n := h.log.count("agent process started"); n != 1 {
		t.Errorf("%d processes for strictly sequential steps", n)
	}
}

// testCounter is what every counter does, whatever it is written in.
func testCounter(t *testing.T, a agent.Agent) {
	t.Helper()
	s := step("x")
	for i := range 12 {
		s.Number = int64(i + 1)
		s.Input.ID = `odd "id" \ ,"tenant": <é> ` + strconv.Itoa(i)
		eff, err := a.Step(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range [][]byte{eff.State, eff.Events[0].Data} {
			var got struct{ N int }
			if err := json.Unmarshal(b, &got); err != nil || got.N != i+1 {
				t.Fatalf("step %d: %s, %v", i+1, b, err)
			}
		}
		if len(eff.Events) != 1 || eff.Events[0].Type != "counted" {
			t.Fatalf("events %+v", eff.Events)
		}
		s.State = eff.State
	}
}

func TestRequestIsWrittenAroundTheBytes(t *testing.T) {
	s := step(`i"1`)
	s.State = json.RawMessage("{\"n\": 9007199254740993,\r\n \"x\":\"\\ud800\\n<\", \"input\":0.10}")
	s.Input.Data = json.RawMessage("[-0.0,\n{\"a\":1,\"a\":2}]")
	s.Now, s.Deadline = when.In(time.FixedZone("", 3600)), when.Truncate(time.Second)
	const want = `{"id":"t/r/b/1/i\"1","tenant":"t","run":"r","branch":"b","agent":"a","step":1,"attempt":1,` +
		`"now":"2026-02-03T04:05:06.000007Z","deadline":"2026-02-03T04:05:06.000000Z",` +
		`"state":{"n": 9007199254740993,   "x":"\ud800\n<", "input":0.10},` +
		`"input":{"id":"i\"1","type":"in","data":[-0.0, {"a":1,"a":2}],"at":"2026-02-03T04:05:06.000007Z","source":"cli"}}` + "\n"
	if got := string(appendFrame(nil, s)); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if !bytes.Contains(s.State, []byte("\r\n")) {
		t.Error("the caller's state was changed")
	}
	s = agent.Step{Tenant: "t", Run: "r", Branch: "b", Agent: "a", Number: 2, Attempt: 3, Now: when, Deadline: when, LastError: "no\nway"}
	const bare = `{"id":"t/r/b/2/-","tenant":"t","run":"r","branch":"b","agent":"a","step":2,"attempt":3,` +
		`"now":"2026-02-03T04:05:06.000007Z","deadline":"2026-02-03T04:05:06.000007Z","state":null,"input":null,"last_error":"no\nway"}` + "\n"
	if got := string(appendFrame(nil, s)); got != bare {
		t.Errorf("got  %s\nwant %s", got, bare)
	}
}

func TestStateAndDataSurviveTheRoundTrip(t *testing.T) {
	h := newHost(t, program("echo"), ExecOptions{})
	s := step("x")
	s.State = json.RawMessage(`{"n": 9007199254740993, "x":"\ud800\u00e9é<", "input":0.10}`)
	s.Input.Data = json.RawMessage(`[-0.0,{"a":1,"a":2}]`)
	eff, err := h.Step(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if string(eff.State) != string(s.State) || string(eff.Events[1].Data) != string(s.Input.Data) {
		t.Errorf("state %s\ndata %s", eff.State, eff.Events[1].Data)
	}
}

func TestFramesOfTheLimitPassAndLongerOnesDoNot(t *testing.T) {
	t.Parallel()
	h := newHost(t, program("echo"), ExecOptions{})
	s := step("x")
	s.State = nil
	s.State = json.RawMessage(`"` + strings.Repeat("s", maxFrame-len(appendFrame(nil, s))+1+len("null")-2) + `"`)
	if n := len(appendFrame(nil, s)); n != maxFrame+1 {
		t.Fatalf("the frame has %d bytes", n)
	}
	eff, err := h.Step(t.Context(), s)
	if err != nil || !bytes.Equal(eff.State, s.State) {
		t.Fatalf("%d bytes came back, %v", len(eff.State), err)
	}
	s.State = append(s.State[:len(s.State)-1], `s"`...)
	_, err = h.Step(t.Context(), s)
	checkError(t, err, "agent a, step t/r/b/1/x: the request has 33554433 bytes, more than 33554432")
}

func TestTheAgentsOwnVerdictsArriveAsTheyAre(t *testing.T) {
	for reply, want := range map[string]agent.Error{
		`"error":{"code":"terminal","message":"no such invoice"}`:           {Code: agent.Terminal, Message: "no such invoice"},
		`"error":{"code":"busy","message":"later","retry_after":"3s"}`:      {Code: agent.Busy, Message: "later", RetryAfter: 3 * time.Second},
		`"error":{"code":"retryable","message":"the model did not answer"}`: {Code: agent.Retryable, Message: "the model did not answer"},
	} {
		h := newHost(t, odd("say", reply), ExecOptions{})
		for range 2 { // a verdict does not cost the process
			_, err := h.step("x")
			got, ok := errors.AsType[*agent.Error](err)
			if !ok || *got != want || err.Error() != want.Error() {
				t.Errorf("%s: %#v", reply, err)
			}
		}
		if n := h.log.count("agent process started"); n != 1 {
			t.Errorf("%d processes", n)
		}
	}
}

func TestInvalidEffectsFailTheStepAndKeepTheProcess(t *testing.T) {
	h := newHost(t, odd("say", `"events":[{"type":"x","foo":1}]`), ExecOptions{})
	for range 2 {
		h.fails("x", `invalid effects: events[0].foo: unknown field in the line "{\"id\":\"t/r/b/1/x\",`)
	}
	if _, err := h.step("x"); errors.As(err, new(*agent.Error)) {
		t.Error("not the agent's verdict")
	}
	if n := h.log.count("agent process started"); n != 1 {
		t.Errorf("%d processes", n)
	}
}

func TestASilentProcessIsKilledAndTheNextStepGetsAFreshOne(t *testing.T) {
	t.Parallel()
	hold := newHolder(t)
	h := newHost(t, "HOLD="+hold.path+" "+odd("forks-silent"), ExecOptions{StepTimeout: 200 * time.Millisecond})
	h.fails("x", "the process was silent for 200ms")
	hold.nobodyLeft()
	h.fails("y", "the process was silent for 200ms")
	hold.nobodyLeft()
	if n := h.log.count("in hand"); n != 2 {
		t.Errorf("%d processes had a step in hand", n)
	}
}

func TestARetryAfterSilenceSucceeds(t *testing.T) {
	t.Parallel()
	h := newHost(t, odd("flaky"), ExecOptions{StepTimeout: 2 * time.Second})
	h.fails("x", "silent")
	s := step("x")
	s.Attempt = 2
	if _, err := h.Step(t.Context(), s); err != nil {
		t.Error(err)
	}
}

func TestAProcessThatNeverReadsIsSilent(t *testing.T) {
	t.Parallel()
	h := newHost(t, odd("deaf"), ExecOptions{StepTimeout: 200 * time.Millisecond})
	s := step("x")
	s.State = json.RawMessage(`"` + strings.Repeat("s", 1<<20) + `"`) // more than a pipe holds
	_, err := h.Step(t.Context(), s)
	checkError(t, err, "silent for 200ms")
}

func TestAStoppedProcessIsKilled(t *testing.T) {
	t.Parallel()
	hold := newHolder(t)
	h := newHost(t, "HOLD="+hold.path+" "+odd("stopped"), ExecOptions{StepTimeout: 200 * time.Millisecond, KillGrace: 50 * time.Millisecond})
	h.fails("x", "silent")
	hold.nobodyLeft()
}

// The agent is stopped until its time is over, goes on then, does not mind TERM, and answers. Its helper, in the same
// group, is told by the TERM when that is.
func TestALateAnswerOfAStoppedProcessChangesNothing(t *testing.T) {
	t.Parallel()
	said := filepath.Join(t.TempDir(), "said")
	command := `agent=$$; (trap "kill -CONT $agent; exit" TERM; while :; do sleep 0.02; done) >&- 2>&- & ` +
		`trap "" TERM; read -r line; if test -e ` + said + `; then echo '{"id":"t/r/b/1/x","state":"fresh"}'; read -r line; exit; fi; ` +
		`kill -STOP $$; echo '{"id":"t/r/b/1/x","state":"late"}' && echo said >` + said
	h := newHost(t, command, ExecOptions{StepTimeout: 300 * time.Millisecond, KillGrace: patience})
	h.fails("x", "the process was silent for 300ms")
	if _, err := os.Stat(said); err != nil {
		t.Errorf("the agent gave no late answer: %v", err)
	}
	eff, err := h.step("x") // the same id: the next attempt
	if err != nil || string(eff.State) != `"fresh"` {
		t.Errorf("state %s, error %v", eff.State, err)
	}
}

func TestHeartbeatsKeepAStepAlive(t *testing.T) {
	t.Parallel()
	h := newHost(t, odd("beats", "14"), ExecOptions{StepTimeout: 2 * time.Second}) // 3.5 s
	if _, err := h.step("x"); err != nil {
		t.Error(err)
	}
}

func TestHeartbeatsDoNotMoveTheDeadline(t *testing.T) {
	t.Parallel()
	hold := newHolder(t)
	h := newHost(t, "HOLD="+hold.path+" "+odd("beats", "9999"), ExecOptions{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := h.Step(ctx, step("x"))
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	checkError(t, err, "agent a, step t/r/b/1/x: stopped before its reply")
	hold.nobodyLeft()
}

func TestACancelledStepLosesItsProcessAndNamesTheCause(t *testing.T) {
	hold := newHolder(t)
	h := newHost(t, "HOLD="+hold.path+" "+odd("forks-silent"), ExecOptions{})
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		h.log.wait(t, "in hand", 1)
		cancel(errors.New("rewound"))
	}()
	_, err := h.Step(ctx, step("x"))
	checkError(t, err, "rewound")
	hold.nobodyLeft()
}

func TestAnythingElseOnStdoutIsAProtocolErrorThatQuotesIt(t *testing.T) {
	h := newHost(t, odd("garbage"), ExecOptions{})
	for range 2 { // the second has a fresh process
		h.fails("x", `protocol error: not JSON: `, `in the line "Traceback (most recent \"call\" last)"`)
	}
	h = newHost(t, odd("banner"), ExecOptions{})
	h.fails("x", `protocol error: not JSON: `, `in the line "Loading the model"`)
	h = newHost(t, `while read -r line; do printf '"\001%0300d"\n' 7; done`, ExecOptions{})
	h.fails("x", "protocol error", `in the line "\"\x01`+strings.Repeat("0", 198)+`"…`)
	h = newHost(t, `read -r line; echo; read -r line`, ExecOptions{})
	h.fails("x", "protocol error", `in the line ""`)
}

func TestALongLineIsAProtocolErrorAndNotBuffered(t *testing.T) {
	h := newHost(t, odd("long"), ExecOptions{})
	h.fails("x", `protocol error: a line longer than 33554432 bytes: "`+strings.Repeat("x", maxQuote)+`"…`)
}

func TestALineMayBeAsLongAsTheLimit(t *testing.T) {
	for _, c := range []struct {
		in, line string
		err      error
	}{
		{"123456789012345678\nx", "123456789012345678", nil},
		{"1234567890123456789\n", "", errFault},
		{"\nx", "", nil},
		{"12", "12", io.EOF},
	} {
		line, err := readLine(bufio.NewReaderSize(strings.NewReader(c.in), 16), 18)
		if string(line) != c.line || !errors.Is(err, c.err) {
			t.Errorf("%q: %q, %v", c.in, line, err)
		}
	}
}

func TestAnExitBeforeTheReplyTellsStatusAndLastWords(t *testing.T) {
	h := newHost(t, odd("crash"), ExecOptions{})
	for range 2 {
		h.fails("x", `ended before its reply: exit status 3`, `last on stderr "boom: it \"broke\""`)
	}
	h = newHost(t, "nope --model m", ExecOptions{})
	h.fails("x", `exit status 127`, "nope: not found")
	h = newHost(t, odd("noend"), ExecOptions{})
	h.fails("x", "exit status 0", `on stdout a line without end "{\"id\":`)
	h = newHost(t, "exec >&-; read -r line; kill -KILL $$", ExecOptions{})
	h.fails("x", "signal: killed")
}

func TestAStaleReplyIsDroppedAndCounted(t *testing.T) {
	h := newHost(t, odd("stale"), ExecOptions{})
	first := h.pid("x")
	if second := h.pid("y"); second != first {
		t.Error("the process was replaced")
	}
	if err := h.Close(t.Context()); err != nil { // so that all it said was read
		t.Fatal(err)
	}
	if n := h.Stale(); n != 6 {
		t.Errorf("%d stale replies, want 3 a step", n)
	}
}

func TestWhatHappensBetweenStepsCostsNoStepAnAttempt(t *testing.T) {
	for after, seen := range map[string]string{
		`echo garbage`:  "agent process will be replaced",
		`exit 7`:        "status=\"exit status 7\"",
		`kill -KILL $$`: "status=\"signal: killed\"",
	} {
		h := newHost(t, odd("then", after), ExecOptions{})
		first := h.pid("x")
		h.log.wait(t, seen, 1)
		if second := h.pid("y"); second == first {
			t.Errorf("%s: the process was kept", after)
		}
	}
}

func TestAnAgentMayServeOneStepAndLeave(t *testing.T) {
	h := newHost(t, odd("once"), ExecOptions{})
	seen := make(map[int]bool)
	for range 20 { // without a pause: its end races with the next request
		seen[h.pid("x")] = true
	}
	if len(seen) != 20 {
		t.Errorf("%d processes for 20 steps", len(seen))
	}
}

func TestAnAnswerCountsThoughItsProcessIsGone(t *testing.T) {
	p := &process{gone: make(chan struct{})}
	close(p.gone)
	for range 50 { // select picks at random
		c := &call{answer: make(chan answer, 1)}
		c.answer <- answer{effects: agent.Effects{Next: agent.Done}}
		if a := p.await(t.Context(), c, make(chan struct{}), time.Hour); a.fault != nil || a.effects.Next != agent.Done {
			t.Fatal(a.fault)
		}
	}
}

func TestFloodsBlockNobody(t *testing.T) {
	h := newHost(t, odd("floods"), ExecOptions{})
	s := step("x")
	s.State = json.RawMessage(`"` + strings.Repeat("s", 100_000) + `"`) // more than a pipe holds
	for range 2 {
		if _, err := h.Step(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	h.log.wait(t, "text="+strings.Repeat("e", maxLogLine)+"\n", 1) // cut
	if err := h.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	// All are in the log or counted as left out: three floods of 20,000 lines, and as many lines of stderr.
	sum := h.log.count("text=flood") + h.log.count("text=eee")
	if sum > 30_000 { // by far too many, however slow the machine
		t.Errorf("%d lines are in the log", sum)
	}
	for _, m := range regexp.MustCompile(`some are left out" .*lines=([0-9]+)`).FindAllStringSubmatch(h.log.all(), -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	if sum != 60_003 {
		t.Errorf("%d lines are in the log or counted, not 60,003", sum)
	}
}

// The node's own settings are none of an agent's business.
func TestAgentsDoNotGetTheNodesSettings(t *testing.T) {
	t.Setenv("POSTRIDER_BROKER", "tcp://u:secret@broker")
	t.Setenv("OTHER", "stays")
	h := newHost(t, `echo "broker=$POSTRIDER_BROKER other=$OTHER" >&2; exec cat >/dev/null`, ExecOptions{StepTimeout: 10 * time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	go func() { _, _ = h.Step(ctx, step("x")); close(done) }()
	h.log.wait(t, `broker= other=stays`, 1)
	cancel()
	<-done
}

func TestProcessesAreBoundedAndAWaitHonoursItsContext(t *testing.T) {
	h := newHost(t, odd("silent"), ExecOptions{Procs: 2})
	ctx, cancel := context.WithCancel(t.Context())
	var inHand sync.WaitGroup
	for _, id := range []string{"x", "y"} {
		inHand.Go(func() { _, _ = h.Step(ctx, step(id)) })
	}
	h.log.wait(t, "in hand", 2)
	short, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer stop()
	_, err := h.Step(short, step("z"))
	checkError(t, err, "agent a, step t/r/b/1/z: wait for a free process: context deadline exceeded")
	if n := h.log.count("agent process started"); n != 2 {
		t.Errorf("%d processes", n)
	}
	cancel()
	inHand.Wait()
}

func TestCloseEndsStdinAndWaits(t *testing.T) {
	hold := newHolder(t)
	h := newHost(t, "HOLD="+hold.path+" "+odd("forks"), ExecOptions{CloseGrace: time.Hour, KillGrace: time.Hour})
	h.pid("x")
	if err := h.Close(context.Background()); err != nil { // the grandchild holds the pipes, and goes by TERM
		t.Error(err)
	}
	hold.nobodyLeft()
	h.log.wait(t, "agent process ended", 1)
	if _, err := h.step("y"); !errors.Is(err, errClosed) {
		t.Error(err)
	}
	if err := h.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestCloseSendsTermAndThenKill(t *testing.T) {
	h := newHost(t, odd("polite"), ExecOptions{CloseGrace: 20 * time.Millisecond, KillGrace: time.Hour})
	h.pid("x")
	_ = h.Close(context.Background())
	h.log.wait(t, "text=TERM", 1)

	hold := newHolder(t)
	h = newHost(t, "HOLD="+hold.path+" "+odd("stubborn"), ExecOptions{CloseGrace: 20 * time.Millisecond, KillGrace: 20 * time.Millisecond})
	h.pid("x")
	h.log.wait(t, "ignoring", 1)
	_ = h.Close(context.Background())
	hold.nobodyLeft()
	h.log.wait(t, `status="signal: killed"`, 1)
}

func TestCloseKillsWhatTheChildLeftBehind(t *testing.T) {
	hold := newHolder(t)
	h := newHost(t, "HOLD="+hold.path+" "+odd("forks-stubborn"), ExecOptions{KillGrace: 20 * time.Millisecond})
	h.pid("x")
	h.log.wait(t, "ignoring", 1)
	_ = h.Close(context.Background())
	hold.nobodyLeft()
}

func TestTheEndOfItsContextMakesCloseImpatient(t *testing.T) {
	hold := newHolder(t)
	h := newHost(t, "HOLD="+hold.path+" "+odd("stubborn"), ExecOptions{CloseGrace: time.Hour, KillGrace: time.Hour})
	h.pid("x")
	h.log.wait(t, "ignoring", 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_ = h.Close(ctx)
	hold.nobodyLeft()
}

func TestCloseEndsStepsInHandAndStepsThatWait(t *testing.T) {
	h := newHost(t, odd("silent"), ExecOptions{CloseGrace: 20 * time.Millisecond})
	errs := make(chan error, 2)
	for _, id := range []string{"x", "y"} {
		go func() { _, err := h.step(id); errs <- err }()
	}
	h.log.wait(t, "in hand", 1)
	_ = h.Close(context.Background())
	for range 2 {
		select {
		case err := <-errs:
			if err == nil {
				t.Error("decided")
			}
		case <-time.After(patience):
			t.Fatal("a step hangs")
		}
	}
	if n := h.log.count("agent process started"); n != 1 {
		t.Errorf("%d processes", n)
	}
}

func TestAClosedAgentStartsNoFreshProcess(t *testing.T) {
	h := newHost(t, odd("leaves"), ExecOptions{CloseGrace: time.Hour})
	h.pid("x")
	done := make(chan error, 1)
	go func() { _, err := h.step("y"); done <- err }()
	h.log.wait(t, "in hand", 1)
	_ = h.Close(context.Background()) // the process ends with status 0, as one that is used up
	if err := <-done; !errors.Is(err, errClosed) {
		t.Error(err)
	}
	if n := h.log.count("agent process started"); n != 1 {
		t.Errorf("%d processes", n)
	}
}

func TestAStepInHandMayAnswerWhileClosing(t *testing.T) {
	h := newHost(t, odd("last"), ExecOptions{CloseGrace: time.Hour})
	done := make(chan error, 1)
	go func() { _, err := h.step("x"); done <- err }()
	h.log.wait(t, "in hand", 1)
	_ = h.Close(context.Background())
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestSomebodyWhoLeftTheGroupDoesNotHoldUpAnything(t *testing.T) {
	t.Parallel()
	h := newHost(t, program("escape")+" & "+odd("say", `"next":"wait"`), ExecOptions{KillGrace: 20 * time.Millisecond})
	if _, err := h.step("x"); err != nil {
		t.Fatal(err)
	}
	h.log.wait(t, "escaped", 1)
	start := time.Now()
	_ = h.Close(context.Background())
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("Close took %v", took)
	}
}

func TestUnusedAgentStartsNothing(t *testing.T) {
	h := newHost(t, odd("ok"), ExecOptions{})
	if err := h.Close(t.Context()); err != nil || h.log.count("") != 1 {
		t.Error(err, h.log.text.String())
	}
}

func TestStepsRunInParallel(t *testing.T) {
	e := NewExec("a", odd("ok"), ExecOptions{}) // the zero value works
	var all sync.WaitGroup
	for i := range 40 {
		all.Go(func() {
			if _, err := e.Step(t.Context(), step(strconv.Itoa(i))); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if err := e.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// A command may hold a secret; what is said of its failure is seen by more people than the node's command line.
func TestErrorsDoNotRepeatTheCommand(t *testing.T) {
	h := newHost(t, "DBPASS=hunter2 sh -c 'exit 3'", ExecOptions{})
	_, err := h.Step(t.Context(), step("x"))
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("error: %v", err)
	}
}

func TestASimpleCommandBecomesItsProgram(t *testing.T) {
	for command, want := range map[string]bool{
		"python3 agent.py":              true,
		"/usr/bin/env python3 -u a.py":  true,
		"./agent --model=m a=b":         true,
		"A=1 python3 agent.py":          false,
		"python3 agent.py; true":        false,
		"while read l; do echo x; done": false,
		"cd agents":                     false,
		"exec python3 agent.py":         false,
		"python3 'my agent.py'":         false,
		"python3 $HOME/agent.py":        false,
		"python3 agent.py | tee log":    false,
		"":                              false,
	} {
		if got := simple(command); got != want {
			t.Errorf("simple(%q) is %v", command, got)
		}
	}
}

func TestAReplyWithAWrongIDIsNamedWhenTheSilenceEnds(t *testing.T) {
	h := newHost(t, `read l; echo '{"id":"another","state":1}'; read l`, ExecOptions{StepTimeout: 300 * time.Millisecond})
	_, err := h.Step(t.Context(), step("x"))
	if err == nil || !strings.Contains(err.Error(), "silent") || !strings.Contains(err.Error(), "not this step's") {
		t.Errorf("error: %v", err)
	}
}
