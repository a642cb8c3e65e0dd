package record

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Control messages are JSON at QoS 1. Their decoders check every name and number; fields they do not know are ignored,
// because more may follow.

// Birth says that a node is there; as the last will, with Online false, that it is not. Retained.
type Birth struct {
	Node     string   `json:"node"`
	Instance string   `json:"instance"` // random, kept beside the database: tells a copy of it apart
	Epoch    int64    `json:"epoch"`
	ShipSeq  int64    `json:"ship_seq"` // sequence of the last shipment
	Online   bool     `json:"online"`
	Tenants  []string `json:"tenants"`
	Public   []string `json:"public"` // agents that take inputs from anybody
}

// Append appends the message.
func (m *Birth) Append(dst []byte) []byte {
	dst = appendField(dst, `{"node":`, m.Node)
	dst = appendField(dst, `,"instance":`, m.Instance)
	dst = appendNumber(dst, `,"epoch":`, m.Epoch)
	dst = appendNumber(dst, `,"ship_seq":`, m.ShipSeq)
	dst = appendBool(dst, `,"online":`, m.Online)
	dst = appendList(dst, `,"tenants":`, m.Tenants, appendString)
	dst = appendList(dst, `,"public":`, m.Public, appendString)
	return append(dst, '}')
}

// ParseBirth reads a birth or a will.
func ParseBirth(b []byte) (Birth, error) {
	var m Birth
	c := unmarshal("birth", b, &m)
	c.name("node", m.Node)
	c.text("instance", m.Instance)
	c.atLeast("epoch", m.Epoch, 0)
	c.atLeast("ship_seq", m.ShipSeq, 0)
	for _, s := range m.Tenants {
		c.name("tenants", s)
	}
	for _, s := range m.Public {
		c.name("public", s)
	}
	return m, c.err
}

// Cursor is how far a consumer has seen the shipments of a node.
type Cursor struct {
	Epoch int64 `json:"epoch"`
	Seq   int64 `json:"seq"`
}

// Range is a stretch of LSNs of a branch, both ends in it, that a fold asks for.
type Range struct {
	Node   string `json:"node"`
	Run    string `json:"run"`
	Branch string `json:"branch"`
	From   int64  `json:"from"`
	To     int64  `json:"to"`
}

// Sync is a fold's question: for the heads of what was shipped after a cursor, or for ranges to be sent again. The topic
// says the tenant and the part.
type Sync struct {
	Fold   string  `json:"fold"`
	Node   string  `json:"node"`  // "" (null): every node
	After  *Cursor `json:"after"` // nil (null): from the beginning, or, with ranges, no heads
	Ranges []Range `json:"ranges"`
}

// Append appends the message.
func (m *Sync) Append(dst []byte) []byte {
	dst = appendField(dst, `{"fold":`, m.Fold)
	if m.Node == "" {
		dst = append(dst, `,"node":null`...)
	} else {
		dst = appendField(dst, `,"node":`, m.Node)
	}
	if m.After == nil {
		dst = append(dst, `,"after":null`...)
	} else {
		dst = appendNumber(dst, `,"after":{"epoch":`, m.After.Epoch)
		dst = append(appendNumber(dst, `,"seq":`, m.After.Seq), '}')
	}
	dst = appendList(dst, `,"ranges":`, m.Ranges, func(dst []byte, g Range) []byte {
		dst = appendField(dst, `{"node":`, g.Node)
		dst = appendField(dst, `,"run":`, g.Run)
		dst = appendField(dst, `,"branch":`, g.Branch)
		dst = appendNumber(dst, `,"from":`, g.From)
		return append(appendNumber(dst, `,"to":`, g.To), '}')
	})
	return append(dst, '}')
}

// ParseSync reads a fold's question.
func ParseSync(b []byte) (Sync, error) {
	var m Sync
	c := unmarshal("sync", b, &m)
	c.name("fold", m.Fold)
	if m.Node != "" {
		c.name("node", m.Node)
	}
	if m.After != nil {
		c.atLeast("after.epoch", m.After.Epoch, 0)
		c.atLeast("after.seq", m.After.Seq, 0)
	}
	for _, g := range m.Ranges {
		c.name("ranges.node", g.Node)
		c.run("ranges.run", g.Run)
		c.branch("ranges.branch", g.Branch)
		c.span("ranges", g.From, g.To)
	}
	return m, c.err
}

// Head is one branch as its node has shipped it.
type Head struct {
	Run      string `json:"run"`
	Branch   string `json:"branch"`
	Gen      int64  `json:"gen"`
	Epoch    int64  `json:"epoch"`
	Parent   string `json:"parent"`   // "": a run's first branch
	ForkLSN  int64  `json:"fork_lsn"` // 0 on a run's first branch
	Live     bool   `json:"live"`
	EventLSN int64  `json:"event_lsn"` // of the last event shipped; 0: none
}

// Heads is one chunk of a node's answer to a sync. The topic says the tenant and the part.
type Heads struct {
	Node  string `json:"node"`
	Epoch int64  `json:"epoch"`
	Seq   int64  `json:"seq"`   // shipments up to this one are in the answer
	Chunk int64  `json:"chunk"` // 1, 2, …
	Last  bool   `json:"last"`
	Runs  []Head `json:"runs"`
}

// Append appends the message.
func (m *Heads) Append(dst []byte) []byte {
	dst = appendField(dst, `{"node":`, m.Node)
	dst = appendNumber(dst, `,"epoch":`, m.Epoch)
	dst = appendNumber(dst, `,"seq":`, m.Seq)
	dst = appendNumber(dst, `,"chunk":`, m.Chunk)
	dst = appendBool(dst, `,"last":`, m.Last)
	dst = appendList(dst, `,"runs":`, m.Runs, func(dst []byte, h Head) []byte {
		dst = appendField(dst, `{"run":`, h.Run)
		dst = appendField(dst, `,"branch":`, h.Branch)
		dst = appendNumber(dst, `,"gen":`, h.Gen)
		dst = appendNumber(dst, `,"epoch":`, h.Epoch)
		dst = appendField(dst, `,"parent":`, h.Parent)
		dst = appendNumber(dst, `,"fork_lsn":`, h.ForkLSN)
		dst = appendBool(dst, `,"live":`, h.Live)
		return append(appendNumber(dst, `,"event_lsn":`, h.EventLSN), '}')
	})
	return append(dst, '}')
}

// ParseHeads reads one chunk of heads.
func ParseHeads(b []byte) (Heads, error) {
	var m Heads
	c := unmarshal("heads", b, &m)
	c.name("node", m.Node)
	c.atLeast("epoch", m.Epoch, 0)
	c.atLeast("seq", m.Seq, 0)
	c.atLeast("chunk", m.Chunk, 1)
	for _, h := range m.Runs {
		c.run("runs.run", h.Run)
		c.lineage("runs", h.Branch, h.Gen, h.Epoch, h.Parent, h.ForkLSN)
		c.atLeast("runs.event_lsn", h.EventLSN, 0)
	}
	return m, c.err
}

// Hole says that the records From to To of a branch, both in it, will never come: retention removed them. It comes on a
// resend topic, which says the tenant, node and run.
type Hole struct {
	Branch  string `json:"branch"`
	Gen     int64  `json:"gen"`
	Epoch   int64  `json:"epoch"`
	Parent  string `json:"parent"`   // "": a run's first branch
	ForkLSN int64  `json:"fork_lsn"` // 0 on a run's first branch
	From    int64  `json:"from"`
	To      int64  `json:"to"`
}

// Append appends the message.
func (m *Hole) Append(dst []byte) []byte {
	dst = appendField(dst, `{"hole":{"branch":`, m.Branch)
	dst = appendNumber(dst, `,"gen":`, m.Gen)
	dst = appendNumber(dst, `,"epoch":`, m.Epoch)
	dst = appendField(dst, `,"parent":`, m.Parent)
	dst = appendNumber(dst, `,"fork_lsn":`, m.ForkLSN)
	dst = appendNumber(dst, `,"from":`, m.From)
	return append(appendNumber(dst, `,"to":`, m.To), `}}`...)
}

// ParseHole reads a hole.
func ParseHole(b []byte) (Hole, error) {
	var w struct {
		Hole *Hole `json:"hole"`
	}
	c := unmarshal("hole", b, &w)
	if w.Hole == nil {
		c.fail("hole", fmt.Errorf("is missing"))
		return Hole{}, c.err
	}
	m := *w.Hole
	c.lineage("hole", m.Branch, m.Gen, m.Epoch, m.Parent, m.ForkLSN)
	c.span("hole", m.From, m.To)
	if m.From <= m.ForkLSN {
		c.fail("hole.from", fmt.Errorf("%d is not after the fork", m.From))
	}
	return m, c.err
}

// IsHole tells the two things apart that come on a resend topic, holes and events, by their first name.
func IsHole(b []byte) bool {
	i := skipSpace(b, 0)
	if i >= len(b) || b[i] != '{' {
		return false
	}
	return bytes.HasPrefix(b[skipSpace(b, i+1):], []byte(`"hole"`))
}

// Outcome is what became of a command at its receiver.
type Outcome string

// The outcomes of a receipt.
const (
	Stored    Outcome = "stored"
	Duplicate Outcome = "duplicate"
	Conflict  Outcome = "conflict"
	DeadInput Outcome = "dead"
)

// Receipt tells a sender what became of its commands.
type Receipt struct {
	From  string        `json:"from"` // the receiving node
	Items []ReceiptItem `json:"items"`
}

// ReceiptItem is the outcome of some commands of one branch. Each range is its first and its last LSN.
type ReceiptItem struct {
	Tenant  string     `json:"tenant"`
	Run     string     `json:"run"`
	Branch  string     `json:"branch"`
	Ranges  [][2]int64 `json:"ranges"`
	Outcome Outcome    `json:"outcome"`
}

// Append appends the message.
func (m *Receipt) Append(dst []byte) []byte {
	dst = appendField(dst, `{"from":`, m.From)
	dst = appendList(dst, `,"items":`, m.Items, func(dst []byte, it ReceiptItem) []byte {
		dst = appendField(dst, `{"tenant":`, it.Tenant)
		dst = appendField(dst, `,"run":`, it.Run)
		dst = appendField(dst, `,"branch":`, it.Branch)
		dst = appendList(dst, `,"ranges":`, it.Ranges, func(dst []byte, g [2]int64) []byte {
			return append(appendNumber(appendNumber(dst, "[", g[0]), ",", g[1]), ']')
		})
		return append(appendField(dst, `,"outcome":`, string(it.Outcome)), '}')
	})
	return append(dst, '}')
}

// ParseReceipt reads a receipt.
func ParseReceipt(b []byte) (Receipt, error) {
	// A slice a range, because a JSON array that is too short or too long fits a Go array without an error.
	var w struct {
		From  string `json:"from"`
		Items []struct {
			ReceiptItem
			Ranges [][]int64 `json:"ranges"`
		} `json:"items"`
	}
	c := unmarshal("receipt", b, &w)
	m := Receipt{From: w.From}
	c.name("from", m.From)
	for _, it := range w.Items {
		c.name("items.tenant", it.Tenant)
		c.run("items.run", it.Run)
		c.branch("items.branch", it.Branch)
		switch it.Outcome {
		case Stored, Duplicate, Conflict, DeadInput:
		default:
			c.fail("items.outcome", fmt.Errorf("%.40q is not known", it.Outcome))
		}
		item := it.ReceiptItem
		for _, g := range it.Ranges {
			if len(g) != 2 {
				c.fail("items.ranges", fmt.Errorf("has a range of %d numbers", len(g)))
				break
			}
			c.span("items.ranges", g[0], g[1])
			item.Ranges = append(item.Ranges, [2]int64{g[0], g[1]})
		}
		m.Items = append(m.Items, item)
	}
	return m, c.err
}

func appendString(dst []byte, s string) []byte { return appendField(dst, "", s) }

func appendBool(dst []byte, name string, v bool) []byte {
	if v {
		return append(append(dst, name...), "true"...)
	}
	return append(append(dst, name...), "false"...)
}

func appendList[T any](dst []byte, name string, list []T, one func([]byte, T) []byte) []byte {
	dst = append(append(dst, name...), '[')
	for i, v := range list {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = one(dst, v)
	}
	return append(dst, ']')
}

// checker keeps the first thing that is wrong with a control message.
type checker struct {
	what string
	err  error
}

func unmarshal(what string, b []byte, v any) *checker {
	c := &checker{what: what}
	if err := json.Unmarshal(b, v); err != nil {
		c.err = fmt.Errorf("parse %s: %w", what, err)
	}
	return c
}

func (c *checker) fail(field string, err error) {
	if err != nil && c.err == nil {
		c.err = fmt.Errorf("parse %s: %s %w", c.what, field, err)
	}
}

func (c *checker) name(field, s string)   { c.fail(field, CheckName(s)) }
func (c *checker) run(field, s string)    { c.fail(field, CheckRun(s)) }
func (c *checker) branch(field, s string) { c.fail(field, CheckBranch(s)) }

func (c *checker) text(field, s string) {
	c.fail(field, CheckText(s))
	if s == "" {
		c.fail(field, fmt.Errorf("is empty"))
	}
}

func (c *checker) atLeast(field string, n, least int64) {
	if n < least {
		c.fail(field, fmt.Errorf("%d is below %d", n, least))
	}
}

func (c *checker) span(field string, from, to int64) {
	if from < 1 || to < from {
		c.fail(field, fmt.Errorf("%d to %d is no range of LSNs", from, to))
	}
}

func (c *checker) lineage(field, branch string, gen, epoch int64, parent string, forkLSN int64) {
	c.branch(field+".branch", branch)
	c.atLeast(field+".gen", gen, 1)
	c.atLeast(field+".epoch", epoch, 0)
	if parent != "" {
		c.branch(field+".parent", parent)
		c.atLeast(field+".fork_lsn", forkLSN, 1)
	} else if forkLSN != 0 {
		c.fail(field+".fork_lsn", fmt.Errorf("is %d without a parent", forkLSN))
	}
}
