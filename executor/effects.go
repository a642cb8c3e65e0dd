package executor

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"postrider/internal/agent"
	"postrider/internal/record"
)

const (
	maxState   = 16 << 20
	maxRecords = 1000
	maxBytes   = 8 << 20 // records of one step together
	maxYear    = 9999
	maxUS      = 253402300799_999999 // its end
)

// effects is what a step asked for, checked and turned into what its transaction writes.
type effects struct {
	state    []byte // nil: unchanged
	records  []record.Record
	local    []arrival // commands: for runs here, or, routed, for elsewhere
	occurred int64
	cancel   []string
	next     agent.Next
}

// limits are the bounds and routes that effects are checked against.
type limits struct {
	node      string
	routes    map[string]Route
	topics    record.Topics
	maxRecord int
	hosted    func(agent string) bool
}

// plan checks everything a step asked for, before its transaction, and names the field that is wrong. occurred is when
// the agent answered, in microseconds; steady is the same in steady time.
func (l limits) plan(c *claim, e agent.Effects, occurred, steady int64) (*effects, error) {
	p := &effects{state: bytes.Clone(e.State), next: e.Next, cancel: e.Cancel, occurred: occurred}
	switch p.next {
	case "":
		p.next = agent.Wait
	case agent.Wait, agent.Continue, agent.Done, agent.Fail:
	default:
		return nil, fmt.Errorf("next: %q is not wait, continue, done or fail", e.Next)
	}
	if e.State != nil {
		if err := checkJSON(e.State, maxState); err != nil {
			return nil, fmt.Errorf("state: %w", err)
		}
	}
	if n := len(e.Events) + len(e.Commands) + len(e.Messages); n > maxRecords {
		return nil, fmt.Errorf("effects: %d records; at most %d a step are allowed", n, maxRecords)
	}
	if n := len(e.Cancel); n > maxRecords {
		return nil, fmt.Errorf("cancel: has %d ids; at most %d a step are allowed", n, maxRecords)
	}
	stamp := record.Record{Occurred: occurred, Correlation: c.cause.correlation, Causation: c.cause.causation, Trace: c.cause.trace}
	for i, ev := range e.Events {
		r := stamp
		r.Kind, r.Type, r.Subject, r.Data = record.Event, ev.Type, ev.Subject, orNull(ev.Data)
		if err := l.event(&r); err != nil {
			return nil, fmt.Errorf("events[%d].%w", i, err)
		}
		p.records = append(p.records, r)
	}
	for i, cmd := range e.Commands {
		if err := l.command(c, p, stamp, i, cmd, steady); err != nil {
			return nil, fmt.Errorf("commands[%d].%w", i, err)
		}
	}
	for i, m := range e.Messages {
		r := stamp
		r.Kind, r.Topic, r.Retain, r.Data, r.Expires = record.Message, m.Topic, m.Retain, m.Payload, after(steady, m.ExpiresIn)
		if err := l.topics.CheckTopic(m.Topic); err != nil {
			return nil, fmt.Errorf("messages[%d].topic: %w", i, err)
		}
		if err := checkExpiry(occurred, m.ExpiresIn); err != nil {
			return nil, fmt.Errorf("messages[%d].%w", i, err)
		}
		if len(m.Payload) > l.maxRecord {
			return nil, fmt.Errorf("messages[%d]: payload has %d bytes; at most %d are allowed", i, len(m.Payload), l.maxRecord)
		}
		p.records = append(p.records, r)
	}
	switch p.next {
	case agent.Done, agent.Fail:
		r := stamp
		r.Kind, r.Type, r.Data = record.Event, record.TypeRunDone, []byte("null")
		if p.next == agent.Fail {
			r.Type = record.TypeRunFailed
		}
		p.records = append(p.records, r)
	}
	total := 0
	for i := range p.records {
		total += len(p.records[i].Data)
	}
	for i := range p.local {
		total += len(p.local[i].data)
	}
	if total > maxBytes {
		return nil, fmt.Errorf("effects: records hold %d bytes; at most %d a step are allowed", total, maxBytes)
	}
	return p, nil
}

func (l limits) event(r *record.Record) error {
	if err := checkType(r.Type); err != nil {
		return fmt.Errorf("type: %w", err)
	}
	if record.IsReserved(r.Type) {
		return fmt.Errorf("type: %q starts with %s, which is kept for the runtime", r.Type, record.ReservedPrefix)
	}
	if len(r.Subject) > 1024 {
		return fmt.Errorf("subject: has %d bytes; at most 1024 are allowed", len(r.Subject))
	}
	if err := record.CheckText(r.Subject); err != nil {
		return fmt.Errorf("subject: %w", err)
	}
	if err := checkJSON(r.Data, l.maxRecord); err != nil {
		return fmt.Errorf("data: %w", err)
	}
	return nil
}

// command sends a command on the one of two ways: into an inbox of this node, within the step's own transaction, or as a
// record to another node.
func (l limits) command(c *claim, p *effects, stamp record.Record, i int, cmd agent.Command, steady int64) error {
	name, node, remote := strings.Cut(cmd.Agent, "@")
	if cmd.Agent == "" {
		name = c.agent
	}
	if err := record.CheckName(name); err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	if remote {
		if err := record.CheckName(node); err != nil {
			return fmt.Errorf("agent: node %w", err)
		}
	}
	here := !remote || node == l.node
	run := cmd.Run
	switch {
	case run == "" && name == c.agent && here:
		run = c.name
	case run == "":
		return fmt.Errorf("run: is missing; only a command to the same agent may leave it out")
	}
	if err := record.CheckName(run); err != nil {
		return fmt.Errorf("run: %w", err)
	}
	if err := checkType(cmd.Type); err != nil {
		return fmt.Errorf("type: %w", err)
	}
	if err := checkJSON(orNull(cmd.Data), l.maxRecord); err != nil {
		return fmt.Errorf("data: %w", err)
	}
	// The id is the same on every path, and on every attempt of the step.
	id := fmt.Sprintf("%s%s/%d/%d", idPrefix, c.branch, c.step, i)
	if cmd.ID != "" {
		if len(cmd.ID) > 255 {
			return fmt.Errorf("id: has %d bytes; at most 255 are allowed", len(cmd.ID))
		}
		if err := record.CheckText(cmd.ID); err != nil {
			return fmt.Errorf("id: %w", err)
		}
		id = idPrefix + l.node + "/" + c.tenant + "/" + c.name + "/" + cmd.ID
	}
	if err := checkDue(stamp.Occurred, cmd.In, cmd.At); err != nil {
		return err
	}
	timer, atUS := cmd.In > 0 || !cmd.At.IsZero(), int64(0)
	if !cmd.At.IsZero() {
		atUS = cmd.At.UnixMicro()
	}
	if err := checkExpiry(stamp.Occurred, cmd.ExpiresIn); err != nil {
		return err
	}
	route, routed := l.routes[name]
	away := remote && node != l.node
	switch {
	case away || l.hosted(name):
	case !routed || route.Node == l.node:
		return fmt.Errorf("agent: %s is not hosted here, and has no route and no node", name)
	}
	a := arrival{tenant: c.tenant, run: run, agent: name, node: node, id: id, explicit: cmd.ID != "", typ: cmd.Type,
		source: "/" + l.node + "/" + c.tenant + "/" + c.name + "/" + c.branch, data: orNull(cmd.Data), in: cmd.In, atUS: atUS,
		expires: after(steady, cmd.ExpiresIn), correlation: stamp.Correlation, causation: stamp.Causation,
		trace: stamp.Trace, createdBranch: c.head.Branch, createdStep: c.step, commandID: cmd.ID, routed: away || !l.hosted(name)}
	if timer {
		a.source = "timer"
	}
	if away && !timer {
		p.records = append(p.records, command(a, node, stamp.Occurred))
	} else {
		p.local = append(p.local, a)
	}
	return nil
}

// checkDue refuses what is no time for a timer. now is in microseconds.
func checkDue(now int64, in time.Duration, at time.Time) error {
	switch {
	case in < 0:
		return fmt.Errorf("in: %s is negative", in)
	case in > 0 && !at.IsZero():
		return fmt.Errorf("at: excludes in")
	case in > 0 && now > maxUS-in.Microseconds():
		return fmt.Errorf("in: %s leads beyond the year %d", in, maxYear)
	case !at.IsZero() && (at.UTC().Year() > maxYear || at.UTC().Year() < 1970):
		return fmt.Errorf("at: %d is not a year from 1970 to %d", at.UTC().Year(), maxYear)
	}
	return nil
}

// checkExpiry refuses what is no time to expire in.
func checkExpiry(now int64, in time.Duration) error {
	switch {
	case in < 0:
		return fmt.Errorf("expires_in: %s is negative", in)
	case now > maxUS-in.Microseconds():
		return fmt.Errorf("expires_in: %s leads beyond the year %d", in, maxYear)
	}
	return nil
}

func after(now int64, d time.Duration) int64 {
	if d <= 0 {
		return 0
	}
	return now + d.Microseconds()
}

func orNull(b json.RawMessage) []byte {
	if b == nil {
		return []byte("null")
	}
	return b
}

// appendReason writes {"reason": …}; the text may hold what an agent printed.
func appendReason(dst []byte, reason string) []byte {
	b, err := json.Marshal(struct {
		Reason string `json:"reason"`
	}{strings.ToValidUTF8(cut(reason, 1024), "\uFFFD")})
	if err != nil {
		panic(err) // a string always marshals
	}
	return append(dst, b...)
}

// cut shortens s to n bytes at a character's start.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
