package kind

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"postrider/internal/agent"
)

const (
	maxLogLine = 4 << 10 // what the logger gets of one line
	maxLogRate = 200     // lines of one process in a second
	maxQuote   = 200     // what an error quotes of one line
)

// errUsedUp is the fault of a process that no step is to blame for: it ended or misbehaved between two steps, or it ended
// with status 0 as the next one came (an agent may well serve one step and leave). The step gets a fresh process.
var errUsedUp = errors.New("process used up")

// process is one child with its group. Its stdout is read all the time, so that nothing an agent says between steps can
// be taken for a reply, or block it.
//
//	supervise ── start ── wait for the child ── TERM the rest ── KILL the rest ── close the pipes ── gone
//	readStdout ── line ── log | stale | heartbeat | answer | fault ──► call
//	readStderr ── line ── log
type process struct {
	grace  time.Duration // from TERM to KILL
	log    *slog.Logger
	stale  *atomic.Int64
	served bool // owned by the step in hand

	cmd            *exec.Cmd
	stdin          io.WriteCloser
	stdout, stderr io.ReadCloser
	gone           chan struct{} // closed when the group is dead and nothing is left to be read
	status         string        // after gone
	success        bool          // after gone: status 0
	lastStderr     string        // after gone
	unfinished     []byte        // after gone: the start of a last line that had no end

	mu    sync.Mutex
	call  *call // the step in hand until it is answered
	ended bool  // the child is dead, its group perhaps not
	fault error // a protocol error while no step was in hand

	logMu    sync.Mutex
	logSince time.Time // of the second that is counted
	logLines int       // in it
	logLeft  int       // left out since the log said so
	logLast  string    // the last of these
	logTimer *time.Timer
}

// call is one step in hand. Both channels have room for one, so that the reader never waits.
type call struct {
	id     string
	answer chan answer
	beat   chan struct{}
	other  atomic.Pointer[string] // the id of a reply that was for another step
}

// answer ends a call. With a fault the process cannot be used again.
type answer struct {
	effects agent.Effects
	err     error
	fault   error
}

// words are what a simple command is made of: nothing there that means anything to a shell.
var words = regexp.MustCompile(`^[A-Za-z0-9_./+:@,-]+( +[A-Za-z0-9_./+:@,=-]+)*$`)

// notPrograms are first words that exec cannot run, or runs otherwise.
var notPrograms = []string{".", ":", "alias", "case", "cd", "command", "do", "done", "else", "esac", "eval", "exec", "exit", "export", "fi", "for",
	"if", "in", "read", "return", "set", "shift", "source", "then", "time", "trap", "ulimit", "umask", "unset", "until", "wait", "while"}

// simple reports whether a command is one program with its arguments. The shell then becomes that program instead of
// waiting for it beside it, and what happens to the one process happens to the agent: Linux kills it with the node.
func simple(command string) bool {
	first, _, _ := strings.Cut(command, " ")
	return words.MatchString(command) && !slices.Contains(notPrograms, first)
}

// ErrNoProgram: the command of an exec agent names a program that is not there, or is none.
var ErrNoProgram = errors.New("no such program")

// find says that the program of a simple command is missing, as far as that is known before it runs: it is looked for as
// the shell will. What only the shell can tell the first step says.
func find(command string) error {
	program, _, _ := strings.Cut(command, " ")
	if !simple(command) || os.Getenv("PATH") == "" { // the shell has a path of its own then
		return nil
	}
	_, err := exec.LookPath(program)
	switch {
	case err == nil, errors.Is(err, exec.ErrDot): // which the shell accepts
		return nil
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, os.ErrNotExist):
		return &missing{fmt.Sprintf("command %s is not found", program)}
	case errors.Is(err, os.ErrPermission):
		return &missing{fmt.Sprintf("command %s is not executable", program)}
	}
	return &missing{fmt.Sprintf("command %s: %s", program, errors.Unwrap(err))}
}

// missing is an ErrNoProgram in words of its own.
type missing struct{ text string }

func (m *missing) Error() string        { return m.text }
func (m *missing) Is(target error) bool { return target == ErrNoProgram }

// environment is this process's without its own settings: a broker's password may be among them.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "POSTRIDER_") })
}

func startProcess(command string, grace time.Duration, log *slog.Logger, stale *atomic.Int64) (*process, error) {
	if simple(command) {
		command = "exec " + command
	}
	cmd := exec.Command("sh", "-c", command)
	cmd.Env = environment()
	cmd.SysProcAttr = procAttr()
	p := &process{grace: grace, log: log, stale: stale, cmd: cmd, gone: make(chan struct{})}
	var errIn, errOut, errErr error
	p.stdin, errIn = cmd.StdinPipe()
	p.stdout, errOut = cmd.StdoutPipe()
	p.stderr, errErr = cmd.StderrPipe()
	if err := errors.Join(errIn, errOut, errErr); err != nil {
		return nil, err // too many open files; the collector closes those there are
	}
	started := make(chan error)
	go p.supervise(started)
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// supervise lives as long as anything of the process does.
func (p *process) supervise(started chan<- error) {
	// The kernel sends the death signal of procAttr when the thread that forked ends, not the process. Locked to this
	// goroutine, that thread outlives the child. It costs nothing: waiting for a child occupies a thread anyway.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	defer close(p.gone)
	p.log.Info("agent process started", "pid", p.cmd.Process.Pid)
	var readers sync.WaitGroup
	readers.Go(p.readStdout)
	readers.Go(p.readStderr)
	eof := make(chan struct{})
	go func() { readers.Wait(); close(eof) }()

	// Not cmd.Wait, which would close the pipes before they are read to their end.
	if state, err := p.cmd.Process.Wait(); err != nil {
		p.status = err.Error()
	} else {
		p.status, p.success = state.String(), state.Success()
	}
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	// What the child left behind holds the pipes open as a rule: their end tells that it is gone, without polling. That
	// the number of an empty group names another one by now would take a whole round of pids within microseconds.
	p.signal(syscall.SIGTERM)
	select {
	case <-eof:
	case <-time.After(p.grace):
	}
	p.signal(syscall.SIGKILL)
	// Whoever left the group and still holds a pipe must not hold up a step or Close.
	_ = p.stdin.Close()
	_ = p.stdout.Close()
	_ = p.stderr.Close()
	<-eof
	p.logMu.Lock()
	p.leftOut()
	p.logMu.Unlock()
	p.log.Info("agent process ended", "pid", p.cmd.Process.Pid, "status", p.status)
}

func (p *process) signal(sig syscall.Signal) { _ = syscall.Kill(-p.cmd.Process.Pid, sig) }

// kill returns when the group is gone. The end of ctx cuts the grace short.
func (p *process) kill(ctx context.Context) {
	select {
	case <-p.gone:
		return
	default:
	}
	p.signal(syscall.SIGTERM)
	select {
	case <-p.gone:
		return
	case <-time.After(p.grace):
	case <-ctx.Done():
	}
	p.signal(syscall.SIGKILL)
	<-p.gone
}

// shutdown asks first: the end of stdin is how an agent learns that there is no more to do.
func (p *process) shutdown(ctx context.Context, grace time.Duration) {
	_ = p.stdin.Close()
	select {
	case <-p.gone:
	case <-time.After(grace):
		p.kill(ctx)
	case <-ctx.Done():
		p.kill(ctx)
	}
}

// decide has one step decided. After a fault the process is gone.
func (p *process) decide(ctx context.Context, id string, frame []byte, silence time.Duration) answer {
	c := &call{id: id, answer: make(chan answer, 1), beat: make(chan struct{}, 1)}
	p.mu.Lock()
	fault, used := p.fault, p.served && p.ended
	p.call = c
	p.mu.Unlock()
	if fault != nil || used {
		p.kill(context.WithoutCancel(ctx))
		if p.served {
			return answer{fault: errUsedUp}
		}
		return answer{fault: fault}
	}

	// In a goroutine, because a child may write more than a pipe holds before it reads, or never read at all.
	wrote := make(chan struct{})
	go func() { _, _ = p.stdin.Write(frame); close(wrote) }()
	a := p.await(ctx, c, wrote, silence)
	if a.fault != nil {
		p.kill(context.WithoutCancel(ctx))
		<-wrote // kill closed the pipe
	}
	p.served = true
	return a
}

// await waits until the step is answered and its request is written: a rest of it would run into the next one.
func (p *process) await(ctx context.Context, c *call, wrote <-chan struct{}, silence time.Duration) answer {
	timer := time.NewTimer(silence)
	defer timer.Stop()
	var got *answer
	for got == nil || wrote != nil {
		select {
		case a := <-c.answer:
			if a.fault != nil {
				return a
			}
			got = &a
		case <-wrote:
			wrote = nil
		case <-c.beat:
			timer.Reset(silence)
		case <-timer.C:
			err := fmt.Errorf("the process was silent for %v (log lines do not count)", silence)
			if other := c.other.Load(); other != nil {
				err = fmt.Errorf("%w, but for a reply with the id %s, which is not this step's", err, cut([]byte(*other)))
			}
			return answer{fault: err}
		case <-ctx.Done():
			return answer{fault: fmt.Errorf("stopped before its reply: %w", context.Cause(ctx))}
		case <-p.gone:
			select {
			case a := <-c.answer:
				got = &a
			default:
			}
			if got == nil {
				return answer{fault: p.exitFault()}
			}
			return *got
		}
	}
	return *got
}

func (p *process) exitFault() error {
	if p.served && p.success && len(p.unfinished) == 0 {
		return errUsedUp
	}
	err := fmt.Errorf("the process ended before its reply: %s", p.status)
	if p.lastStderr != "" {
		err = fmt.Errorf("%w, last on stderr %s", err, cut([]byte(p.lastStderr)))
	}
	if len(p.unfinished) > 0 {
		err = fmt.Errorf("%w, on stdout a line without end %s", err, cut(p.unfinished))
	}
	return err
}

func (p *process) readStdout() {
	r := bufio.NewReaderSize(p.stdout, 64<<10)
	for {
		line, err := readLine(r, maxFrame)
		if err == nil {
			err = p.line(line)
		}
		if errors.Is(err, errFault) {
			// Nothing it says can be trusted now. Reading on keeps it from blocking before it sees TERM.
			p.report(answer{fault: err})
			_, _ = io.Copy(io.Discard, r)
			return
		}
		if err != nil {
			p.unfinished = line[:min(len(line), maxQuote+1)]
			return
		}
	}
}

// errFault is in every protocol error.
var errFault = errors.New("protocol error")

// line takes one line of stdout. An error is a protocol error.
func (p *process) line(b []byte) error {
	r, err := agent.DecodeReply(b)
	switch {
	case err != nil && r.ID == "":
		return fmt.Errorf("%w: %w in the line %s", errFault, err, cut(b))
	case r.Log != nil:
		p.say(false, (*r.Log)[:min(len(*r.Log), maxLogLine)])
		return nil
	}
	p.mu.Lock()
	c := p.call
	p.mu.Unlock()
	switch {
	case c == nil || c.id != r.ID:
		p.stale.Add(1)
		if c != nil {
			c.other.Store(&r.ID)
		}
		p.log.Debug("stale reply dropped", "line", cut(b))
	case err != nil:
		p.report(answer{err: fmt.Errorf("invalid effects: %w in the line %s", err, cut(b))})
	case r.Heartbeat:
		select {
		case c.beat <- struct{}{}:
		default:
		}
	case r.Error != nil:
		p.report(answer{err: r.Error})
	default:
		p.report(answer{effects: r.Effects})
	}
	return nil
}

// say passes a line of the process on to the log. One that chatters must not fill the disk with it: what is too much is
// left out, and counted.
func (p *process) say(stderr bool, text string) {
	p.logMu.Lock()
	defer p.logMu.Unlock()
	if now := time.Now(); now.Sub(p.logSince) >= time.Second {
		p.leftOut()
		p.logSince, p.logLines = now, 0
	}
	if p.logLines++; p.logLines > maxLogRate {
		if p.logLeft++; p.logLeft == 1 { // it may say no more for long
			p.logTimer = time.AfterFunc(time.Second, func() {
				p.logMu.Lock()
				defer p.logMu.Unlock()
				p.leftOut()
			})
		}
		p.logLast = text
		return
	}
	if stderr {
		p.log.Info("agent stderr", "text", text)
		return
	}
	p.log.Info("agent log", "text", text)
}

// leftOut tells what say kept from the log; logMu is held.
func (p *process) leftOut() {
	if p.logLeft > 0 {
		p.logTimer.Stop()
		p.log.Warn("agent wrote too many log lines; some are left out", "lines", p.logLeft, "last", p.logLast)
		p.logLeft = 0
	}
}

// report ends the call in hand. A fault without one is kept, and costs no step an attempt.
func (p *process) report(a answer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.call; c != nil {
		p.call = nil
		c.answer <- a
		return
	}
	p.fault = a.fault
	p.log.Warn("agent process will be replaced", "err", a.fault)
}

func (p *process) readStderr() {
	r := bufio.NewReaderSize(p.stderr, maxLogLine)
	for {
		line, err := r.ReadSlice('\n')
		text := strings.TrimRight(string(line), "\r\n")
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = r.ReadSlice('\n')
		}
		if text != "" {
			p.lastStderr = text
			p.say(true, text)
		}
		if err != nil {
			return
		}
	}
}

// readLine returns a line without its line feed, in memory of its own. Of a line longer than limit it returns the start
// and a protocol error, and never holds more.
func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		part = bytes.TrimSuffix(part, []byte("\n"))
		if len(line)+len(part) > limit {
			line = append(line, part...)
			return nil, fmt.Errorf("%w: a line longer than %d bytes: %s", errFault, limit, cut(line))
		}
		line = append(line, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// cut quotes an agent's bytes for an error message.
func cut(b []byte) string {
	if len(b) > maxQuote {
		return fmt.Sprintf("%q…", b[:maxQuote])
	}
	return fmt.Sprintf("%q", b)
}
