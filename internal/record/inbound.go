package record

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Inbound is an input on its way in from a broker; with a Fault, what could not become one and is a dead letter.
type Inbound struct {
	Tenant, Agent string // "" only with a Fault
	Run           string // "": a new one
	ID            string // input id; "": the sender gave none, and a redelivery is another input
	Type, Source  string // a CloudEvents source, or mqtt:<topic>
	Data          []byte // JSON as it came; with a Fault the payload

	Correlation, Causation, Trace string
	Hops                          int64 // hand-overs so far
	Expires                       int64 // wall-clock microseconds since 1970; 0: never

	// From is the sender's key where another Postrider node sent this, with LSN; then ID may begin with pr:.
	FromNode string
	From     BranchKey
	LSN      int64 // 0: no record of a node

	Fault string // why it is a dead letter; "": it is none
}

// TypeRaw is the type of an input that was no CloudEvent, and of what could not become an input.
const TypeRaw = "mqtt.message"

// Limits of one input, in bytes. They are the executor's: what passes here is stored.
const (
	MaxInput     = 8 << 20 // of data
	maxInputID   = 512
	maxInputType = 255
	maxAttribute = 1024 // other attributes that go along, such as the source
)

// faultKept is how much of a payload over MaxInput its dead letter keeps.
const faultKept = 64 << 10

// inputPrefix starts the ids that nodes make, and no other.
const inputPrefix = "pr:"

// Inlets says which topics of a broker are inputs, and for whom. Check comes before its other methods.
//
// On the node's own inbox come CloudEvents with toagent: commands of other nodes, and what anybody else sends in that form.
// On the inbox of a public agent, whose topic names tenant and agent, and on other people's topics by a Rule, which names
// agent and run, comes anything: a CloudEvent is known by its structure, a JSON object with specversion, id, source and
// type, none of them null; all else is raw.
//
//	            agent      run                                              input id
//	node inbox  toagent    torun, else made of the input id                 inputid, else "<source> <id>"
//	public      the topic  the same for a CloudEvent; raw: a new one        the same; raw: none
//	rule        the rule   the rule; without one as public, but for torun   the same; raw: none
//
// An id counts within its run. So a run that nobody named is made of the agent and the id, and a CloudEvent that comes twice
// comes to one run and counts once. A source is a URI reference and has no space: the pair (source, id) is told apart from
// every other.
//
// Data of a CloudEvent is handed on byte for byte, null when it is absent. data_base64 is decoded when it holds JSON and
// datacontenttype says so or is absent, else it becomes {"datacontenttype":"…","base64":"…"}. A raw payload becomes
// {"topic":"…","json":…,"retained":false} with the payload's bytes, or "text" of what is UTF-8 and no JSON, or "base64" of
// the rest; it has no id, so what the broker sends again is another input. Whatever breaks a rule is a Fault, whole.
type Inlets struct {
	Topics Topics
	Node   string
	Public []string // agents
	Rules  []Rule   // of the tenant DefaultTenant
}

// DefaultTenant owns what is not said to be somebody else's.
const DefaultTenant = "default"

// Rule makes inputs of what comes on other people's topics.
type Rule struct {
	Filter string // of MQTT
	Agent  string
	Run    string // "": as Inlets says; {n} stands for level n of the topic, counted from 0
}

// ParseRule reads FILTER=AGENT[/RUN]. The last = counts: filters may have some.
func ParseRule(s string) (Rule, error) {
	i := strings.LastIndexByte(s, '=')
	if i < 0 {
		return Rule{}, fmt.Errorf("%.80q is not FILTER=AGENT or FILTER=AGENT/RUN", s)
	}
	r := Rule{Filter: s[:i]}
	var hasRun bool
	r.Agent, r.Run, hasRun = strings.Cut(s[i+1:], "/")
	if hasRun && r.Run == "" {
		return Rule{}, fmt.Errorf("%.80q has no run after the slash", s)
	}
	if err := r.check(); err != nil {
		return Rule{}, fmt.Errorf("%.80q: %w", s, err)
	}
	return r, nil
}

func (r *Rule) check() error {
	if err := checkFilter(r.Filter); err != nil {
		return fmt.Errorf("filter %w", err)
	}
	if err := CheckName(r.Agent); err != nil {
		return fmt.Errorf("agent %w", err)
	}
	if r.Run == "" {
		return nil
	}
	levels := strings.Split(r.Filter, "/")
	if n := len(levels) - 1; levels[n] == "#" {
		levels = levels[:n] // it may stand for no level at all
	}
	for i := range levels {
		if levels[i] == "+" {
			levels[i] = "x" // what any name may have
		}
	}
	run, err := fillIn(r.Run, levels)
	if err != nil {
		return fmt.Errorf("run %w", err)
	}
	if err := CheckName(run); err != nil {
		return fmt.Errorf("run %w", err)
	}
	return nil
}

// fillIn replaces each {n} by levels[n].
func fillIn(run string, levels []string) (string, error) {
	var b strings.Builder
	for rest := run; ; {
		before, after, found := strings.Cut(rest, "{")
		b.WriteString(before)
		if !found {
			return b.String(), nil
		}
		number, after, found := strings.Cut(after, "}")
		n, ok := parseDecimal([]byte(number))
		if !found || !ok {
			return "", fmt.Errorf("%.80q: in braces stands the number of a level", run)
		}
		if n >= int64(len(levels)) {
			return "", fmt.Errorf("%.80q: every topic of the filter has levels 0 to %d, not {%s}", run, len(levels)-1, number)
		}
		b.WriteString(levels[n])
		rest = after
	}
}

func checkFilter(s string) error {
	switch {
	case s == "":
		return errors.New("is empty")
	case len(s) > maxTopic:
		return fmt.Errorf("%.40q… is longer than %d bytes", s, maxTopic)
	case s[0] == '$':
		return fmt.Errorf("%.40q starts with $", s)
	}
	if err := CheckText(s); err != nil {
		return err
	}
	for rest, more := s, true; more; {
		var level string
		level, rest, more = strings.Cut(rest, "/")
		if level == "#" && !more || level == "+" || !strings.ContainsAny(level, "+#") {
			continue
		}
		return fmt.Errorf("%.80q: + stands for a whole level, # for all that are left", s)
	}
	return nil
}

// Check says what is wrong with the inlets: names, filters, what is there twice, and filters that take in Postrider's own topics.
func (in *Inlets) Check() error {
	if err := CheckName(in.Node); err != nil {
		return fmt.Errorf("node %w", err)
	}
	for i, agent := range in.Public {
		if err := CheckName(agent); err != nil {
			return fmt.Errorf("public agent %w", err)
		}
		if slices.Contains(in.Public[:i], agent) {
			return fmt.Errorf("public agent %s is given twice", agent)
		}
	}
	root := strings.TrimSuffix(in.Topics.base(), "/v1/")
	for i, r := range in.Rules {
		if err := r.check(); err != nil {
			return fmt.Errorf("subscription to %.80q: %w", r.Filter, err)
		}
		if slices.Contains(in.Rules[:i], r) {
			return fmt.Errorf("subscription to %.80q for %s is given twice", r.Filter, r.Agent)
		}
		if r.Filter == root || strings.HasPrefix(r.Filter, root+"/") || overlap(r.Filter, root+"/v1/+/+/+/#") {
			return fmt.Errorf("subscription to %.80q takes in topics under %s, which are Postrider's own", r.Filter, root)
		}
	}
	return nil
}

// overlap says whether some topic matches both filters.
func overlap(a, b string) bool {
	for {
		x, restX, moreX := strings.Cut(a, "/")
		y, restY, moreY := strings.Cut(b, "/")
		switch {
		case x == "#" || y == "#":
			return true
		case x != "+" && y != "+" && x != y:
			return false
		case !moreX && !moreY:
			return true
		case !moreX:
			return restY == "#" // it also stands for no level
		case !moreY:
			return restX == "#"
		}
		a, b = restX, restY
	}
}

// Filters is what to subscribe to, each once: the node's inbox and those of the public agents for every tenant, and the
// rules'.
func (in *Inlets) Filters() []string {
	filters := []string{in.Topics.NodeInboxFilter("", in.Node)}
	for _, agent := range in.Public {
		filters = append(filters, in.Topics.AgentInboxFilter("", agent))
	}
	for _, r := range in.Rules {
		if !slices.Contains(filters, r.Filter) {
			filters = append(filters, r.Filter)
		}
	}
	return filters
}

// matches says whether a filter without $ takes a topic.
func matches(filter, topic string) bool {
	if filter == "" || topic == "" || topic[0] == '$' {
		return false
	}
	return overlap(filter, topic)
}

// Decode makes inputs of a message, one for each inlet that takes its topic; none when no inlet does. It never fails: what is
// wrong with a message is its Fault. Data may be part of payload, which must not be changed while the inputs are in use.
func (in *Inlets) Decode(topic string, payload []byte, retained bool) []Inbound {
	m := arrived{topic: topic, payload: payload, retained: retained}
	if strings.ContainsAny(topic, "+#") { // no topic, and would match as a filter does
		return nil
	}
	if matches(in.Topics.NodeInboxFilter("", in.Node), topic) {
		return []Inbound{in.fromNodeInbox(&m)}
	}
	for _, agent := range in.Public {
		if matches(in.Topics.AgentInboxFilter("", agent), topic) {
			return []Inbound{in.fromAgentInbox(&m)}
		}
	}
	var list []Inbound
	for _, r := range in.Rules {
		if matches(r.Filter, topic) {
			list = append(list, m.byRule(r))
		}
	}
	return list
}

// arrived is a message, and what was found out about it.
type arrived struct {
	topic    string
	payload  []byte
	retained bool
	looked   bool
	event    *loose // nil: it is no CloudEvent
	no       error  // why
}

// fault is what becomes of a message that breaks a rule. to has where it should have gone, as far as that is known.
func (m *arrived) fault(to Inbound, err error) Inbound {
	// A topic that CheckText refuses is only seen here, for people.
	topic := strings.Map(func(c rune) rune {
		if isControl(c) || isNonCharacter(c) {
			return utf8.RuneError
		}
		return c
	}, strings.ToValidUTF8(m.topic, "\ufffd"))
	f := Inbound{Tenant: to.Tenant, Agent: to.Agent, Run: to.Run, Type: TypeRaw, Source: "mqtt:" + topic, Data: m.payload, Fault: err.Error()}
	if n := len(m.payload); n > MaxInput {
		f.Data = slices.Clone(m.payload[:faultKept]) // not the array behind it
		f.Fault += fmt.Sprintf(" (the first %d of %d bytes are kept)", faultKept, n)
	}
	return f
}

func (in *Inlets) fromNodeInbox(m *arrived) Inbound {
	var to Inbound
	p, err := in.Topics.Parse(m.topic)
	if err != nil {
		return m.fault(to, err)
	}
	to.Tenant = p.Tenant
	if !m.isEvent() {
		return m.fault(to, fmt.Errorf("not a CloudEvent: %w", m.no))
	}
	if m.event.ofNode() {
		r, err := ParseCloudEvent(m.payload)
		if err == nil {
			err = p.Carries(&r)
		}
		if err == nil {
			err = checkInput(r.Type, r.InputID, r.Data)
		}
		if err != nil {
			return m.fault(to, err)
		}
		return Inbound{
			Tenant: p.Tenant, Agent: r.ToAgent, Run: r.ToRun, ID: r.InputID, Type: r.Type, Source: r.Source(), Data: r.Data,
			Correlation: r.Correlation, Causation: r.Causation, Trace: r.Trace, Hops: r.Hops, Expires: r.Expires,
			FromNode: r.Node, From: r.Key, LSN: r.LSN,
		}
	}
	if to.Agent, err = m.event.name(aToagent); err == nil && to.Agent == "" {
		err = errors.New("toagent is missing")
	}
	if err != nil {
		return m.fault(to, err)
	}
	return m.addressed(to)
}

func (in *Inlets) fromAgentInbox(m *arrived) Inbound {
	var to Inbound
	p, err := in.Topics.Parse(m.topic)
	if err != nil {
		return m.fault(to, err)
	}
	to.Tenant, to.Agent = p.Tenant, p.Agent
	if !m.isEvent() {
		return m.raw(to)
	}
	agent, err := m.event.name(aToagent)
	if err == nil && agent != "" && agent != p.Agent {
		err = fmt.Errorf("toagent %q is not the topic's, %s", agent, p.Agent)
	}
	if err != nil {
		return m.fault(to, err)
	}
	return m.addressed(to)
}

func (m *arrived) byRule(r Rule) Inbound {
	to := Inbound{Tenant: DefaultTenant, Agent: r.Agent}
	if r.Run != "" {
		run, err := fillIn(r.Run, strings.Split(m.topic, "/"))
		if err == nil {
			err = CheckName(run)
		}
		if err != nil {
			return m.fault(to, fmt.Errorf("run %s of the topic %w", r.Run, err))
		}
		to.Run = run
	}
	if !m.isEvent() {
		return m.raw(to)
	}
	return m.take(to)
}

// addressed takes a CloudEvent whose sender may name the run.
func (m *arrived) addressed(to Inbound) Inbound {
	run, err := m.event.name(aTorun)
	if err != nil {
		return m.fault(to, err)
	}
	to.Run = run
	return m.take(to)
}

// take makes an input of a CloudEvent that is no node's.
func (m *arrived) take(to Inbound) Inbound {
	e, i := m.event, to
	if e.err != nil {
		return m.fault(to, e.err)
	}
	i.Type, i.Source, i.ID = string(e.text[aType]), string(e.text[aSource]), string(e.text[aInputid])
	switch {
	case e.has(aInputid):
	case strings.Contains(i.Source, " "):
		return m.fault(to, fmt.Errorf("source %.40q has a space, and is no URI reference", i.Source))
	default:
		i.ID = i.Source + " " + string(e.text[aID])
	}
	var err error
	if i.Data, err = e.value(); err != nil {
		return m.fault(to, err)
	}
	i.Correlation, i.Causation, i.Trace = string(e.text[aCorrelationid]), string(e.text[aCausationid]), string(e.text[aTraceparent])
	if err := checkInput(i.Type, i.ID, i.Data); err != nil {
		return m.fault(to, err)
	}
	if strings.HasPrefix(i.ID, inputPrefix) {
		return m.fault(to, fmt.Errorf("input id %.40q starts with %s, which is kept for nodes", i.ID, inputPrefix))
	}
	for _, a := range [...]struct {
		name string
		s    string
		most int
	}{
		{"source", i.Source, maxAttribute}, {"correlationid", i.Correlation, maxInputID}, {"causationid", i.Causation, maxInputID},
		{"traceparent", i.Trace, maxInputID},
	} {
		if err := checkAttribute(a.s, 0, a.most); err != nil {
			return m.fault(to, fmt.Errorf("%s %w", a.name, err))
		}
	}
	if e.has(aExpirytime) {
		at, err := time.Parse(time.RFC3339, string(e.text[aExpirytime]))
		if err != nil {
			return m.fault(to, fmt.Errorf("expirytime %.40q is not a time such as 2006-01-02T15:04:05Z", e.text[aExpirytime]))
		}
		if i.Expires = at.UnixMicro(); i.Expires == 0 {
			i.Expires = 1 // 0 is never
		}
	}
	if i.Run == "" {
		i.Run = runOf(i.Agent, i.ID)
	}
	return i
}

// runOf names the run of an input whose sender named none: the same one for the same input.
func runOf(agent, id string) string {
	sum := sha256.Sum256([]byte(agent + "\x00" + id))
	return "ce-" + hex.EncodeToString(sum[:16])
}

func checkInput(typ, id string, data []byte) error {
	if err := checkAttribute(typ, 1, maxInputType); err != nil {
		return fmt.Errorf("type %w", err)
	}
	if err := checkAttribute(id, 1, maxInputID); err != nil {
		return fmt.Errorf("input id %w", err)
	}
	if len(data) > MaxInput {
		return fmt.Errorf("data has %d bytes; at most %d are allowed", len(data), MaxInput)
	}
	return nil
}

func checkAttribute(s string, least, most int) error {
	if len(s) < least || len(s) > most {
		return fmt.Errorf("has %d bytes; %d to %d are allowed", len(s), least, most)
	}
	return CheckText(s)
}

// raw makes an input of what is no CloudEvent.
func (m *arrived) raw(to Inbound) Inbound {
	if len(m.payload) > MaxInput {
		return m.fault(to, fmt.Errorf("payload has %d bytes; at most %d are allowed", len(m.payload), MaxInput))
	}
	if err := CheckText(m.topic); err != nil {
		return m.fault(to, fmt.Errorf("topic %w", err))
	}
	i := to
	i.Type, i.Source = TypeRaw, "mqtt:"+m.topic
	data := appendField(make([]byte, 0, len(m.payload)+len(m.topic)+64), `{"topic":`, m.topic)
	text := utf8.Valid(m.payload)
	end, err := skipValue(m.payload, 0)
	switch {
	case text && errors.Is(err, errDeep), text && err == nil && skipSpace(m.payload, end) == len(m.payload) && depth(m.payload) == maxDepth:
		// Whether something this deep would have been a CloudEvent is not known. Around other payloads there is one level more.
		return m.fault(to, fmt.Errorf("payload nests deeper than %d, or the data of a CloudEvent deeper than %d", maxDepth-1, maxDepth))
	case text && err == nil && skipSpace(m.payload, end) == len(m.payload):
		data = append(append(data, `,"json":`...), m.payload...)
	case text:
		data = appendField(data, `,"text":`, string(m.payload))
	default:
		data = append(base64.StdEncoding.AppendEncode(append(data, `,"base64":"`...), m.payload), '"')
	}
	if i.Data = fmt.Appendf(data, `,"retained":%t}`, m.retained); len(i.Data) > MaxInput {
		return m.fault(to, fmt.Errorf("payload becomes data of %d bytes; at most %d are allowed", len(i.Data), MaxInput))
	}
	return i
}

// depth is how deep the arrays and objects of a value nest, which skipValue has passed.
func depth(b []byte) (deepest int) {
	open, inText := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case inText && c == '\\':
			i++
		case c == '"':
			inText = !inText
		case inText:
		case c == '{', c == '[':
			open++
			deepest = max(deepest, open)
		case c == '}', c == ']':
			open--
		}
	}
	return deepest
}

// isEvent says whether the payload is a CloudEvent by its structure. One that is broken beyond that has an err.
func (m *arrived) isEvent() bool {
	if m.looked {
		return m.event != nil
	}
	m.looked = true
	var e loose
	if m.no = e.scan(m.payload); m.no != nil {
		return false
	}
	for _, a := range [...]attr{aSpecversion, aID, aSource, aType} {
		if !e.has(a) {
			m.no = fmt.Errorf("%s is missing", attrNames[a])
			return false
		}
	}
	e.check(m.payload)
	m.event = &e
	return true
}

// loose is the top level of a JSON object that anybody may have written. Attributes that inputs do not need may hold anything.
type loose struct {
	present uint32        // attributes that are there and not null
	seen    uint32        // that are there
	text    [aData][]byte // of those that must be strings
	data    []byte
	err     error // the first thing that no CloudEvent may have
}

func (e *loose) has(a attr) bool { return e.present&(1<<a) != 0 }

func (e *loose) note(format string, args ...any) {
	if e.err == nil {
		e.err = fmt.Errorf(format, args...)
	}
}

// scan reads an object; its error says why b is none.
func (e *loose) scan(b []byte) error {
	i := skipSpace(b, 0)
	if i >= len(b) || b[i] != '{' {
		return errors.New("not a JSON object")
	}
	i = skipSpace(b, i+1)
	for first := true; !first || i >= len(b) || b[i] != '}'; first = false {
		end, escaped, err := skipString(b, i)
		if err != nil {
			return err
		}
		name := b[i+1 : end-1]
		if escaped {
			if name, err = unescape(name); err != nil {
				e.note("attribute name: %w", err)
			}
		}
		if i, err = skipColon(b, end); err != nil {
			return err
		}
		i = skipSpace(b, i)
		if end, err = skipValue(b, i); err != nil {
			return err
		}
		if a, known := attrOf(name); known {
			e.take(a, b[i:end:end])
		}
		i = skipSpace(b, end)
		if i >= len(b) {
			return errEnd
		}
		if b[i] == '}' {
			break
		}
		if b[i] != ',' {
			return unexpected(b, i)
		}
		i = skipSpace(b, i+1)
	}
	if i = skipSpace(b, i+1); i < len(b) {
		return fmt.Errorf("goes on after its object: %w", unexpected(b, i))
	}
	return nil
}

func (e *loose) take(a attr, value []byte) {
	if e.seen&(1<<a) != 0 {
		e.note("attribute %s is there twice", attrNames[a])
		return
	}
	e.seen |= 1 << a
	if a == aData {
		e.data = value
	}
	if string(value) == "null" {
		return
	}
	e.present |= 1 << a
	switch a {
	case aSpecversion, aID, aSource, aType, aDatacontenttype, aCorrelationid, aCausationid, aTraceparent, aToagent, aTorun, aInputid,
		aExpirytime, aDataBase64:
		text, _, err := stringAt(value, 0)
		if err != nil {
			e.note("%s: %w", attrNames[a], err)
		}
		e.text[a] = text
	}
}

// check finds what is wrong with a CloudEvent beyond its structure.
func (e *loose) check(b []byte) {
	if !utf8.Valid(b) {
		e.err = errors.New("not UTF-8") // first of all: texts of errors quote attributes
		return
	}
	if v := e.text[aSpecversion]; string(v) != "1.0" {
		e.note("specversion %.40q is not 1.0", v)
	}
	for a, v := range e.text {
		if e.has(attr(a)) && v != nil && len(v) == 0 && attr(a) != aDataBase64 {
			e.note("%s is empty", attrNames[a])
		}
	}
	if e.has(aDataBase64) && e.data != nil {
		e.note("data and data_base64 are both there")
	}
}

// ofNode says whether the source is one that only nodes have, /<node>/<tenant>/<run>/<branch>.
func (e *loose) ofNode() bool {
	_, key, ok := splitSource(string(e.text[aSource]))
	return ok && CheckBranch(key.Branch) == nil
}

// name is an attribute that names an agent or a run; "": it is absent.
func (e *loose) name(a attr) (string, error) {
	if e.err != nil || !e.has(a) {
		return "", e.err
	}
	s := string(e.text[a])
	if err := CheckName(s); err != nil {
		return "", fmt.Errorf("%s %w", attrNames[a], err)
	}
	return s, nil
}

// value is the data of an input.
func (e *loose) value() ([]byte, error) {
	if !e.has(aDataBase64) {
		if e.data == nil {
			return []byte("null"), nil
		}
		return e.data, nil
	}
	data, err := base64.StdEncoding.Strict().DecodeString(string(e.text[aDataBase64]))
	if err != nil {
		return nil, fmt.Errorf("data_base64: %w", err)
	}
	typ := string(e.text[aDatacontenttype])
	media, _, _ := strings.Cut(typ, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	declared := media == "application/json" || media == "text/json" || strings.HasSuffix(media, "+json")
	if declared || typ == "" {
		end, err := skipValue(data, 0)
		if err == nil && (skipSpace(data, end) != len(data) || !utf8.Valid(data)) {
			err = errors.New("not one value in UTF-8")
		}
		if err == nil {
			return trimSpace(data), nil
		}
		if declared {
			return nil, fmt.Errorf("data_base64 is not the JSON that datacontenttype says: %w", err)
		}
	}
	out := []byte{'{'}
	if typ != "" {
		out = append(appendField(out, `"datacontenttype":`, typ), ',')
	}
	return append(appendField(out, `"base64":`, string(e.text[aDataBase64])), '}'), nil
}
