package record

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// DefaultRoot is the root of all topics where none is given.
const DefaultRoot = "postrider"

// Partitions is how many parts the runs of a tenant are spread over; consumers scale out by them.
const Partitions = 16

// Partition is the part of a run: FNV-1a 32 over tenant, a zero byte, run; mod 16. It is in every topic of the run, so it
// can never change.
func Partition(tenant, run string) int {
	const offset, prime = 2166136261, 16777619
	h := uint32(offset)
	for i := range len(tenant) {
		h = (h ^ uint32(tenant[i])) * prime
	}
	h *= prime // the zero byte
	for i := range len(run) {
		h = (h ^ uint32(run[i])) * prime
	}
	return int(h % Partitions)
}

// ParsePartitions reads a list such as "0-3,7" into ascending numbers without repetition.
func ParsePartitions(s string) ([]int, error) {
	var has [Partitions]bool
	for item := range strings.SplitSeq(s, ",") {
		item = strings.TrimSpace(item)
		first, last, isRange := strings.Cut(item, "-")
		lo, err := parsePartition(strings.TrimSpace(first))
		hi := lo
		if err == nil && isRange {
			hi, err = parsePartition(strings.TrimSpace(last))
		}
		if err != nil {
			return nil, fmt.Errorf("partitions %.40q: %w", s, err)
		}
		if lo > hi {
			return nil, fmt.Errorf("partitions %.40q: %q goes down", s, item)
		}
		for p := lo; p <= hi; p++ {
			has[p] = true
		}
	}
	var parts []int
	for p, ok := range has {
		if ok {
			parts = append(parts, p)
		}
	}
	return parts, nil
}

func parsePartition(s string) (int, error) {
	if s == "" {
		return 0, errors.New("a number is missing")
	}
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0, fmt.Errorf("%.20q is not a number", s)
	}
	if err != nil || n >= Partitions {
		return 0, fmt.Errorf("%.20s is not in 0-%d", s, Partitions-1)
	}
	return int(n), nil
}

// Topics names all topics under one root. The zero value stands for DefaultRoot. Arguments are names that CheckName has
// passed; where a filter takes a tenant, "" means every tenant.
type Topics struct{ Root string }

func (t Topics) base() string {
	if t.Root == "" {
		return DefaultRoot + "/v1/"
	}
	return t.Root + "/v1/"
}

// Events is where all events of a run go, because MQTT keeps order per topic only.
func (t Topics) Events(tenant, node, run string) string {
	return t.base() + tenant + "/events/" + strconv.Itoa(Partition(tenant, run)) + "/" + node + "/" + run
}

// NodeInbox is where other nodes send commands for the agents of node.
func (t Topics) NodeInbox(tenant, node string) string {
	return t.base() + tenant + "/nodes/" + node + "/inbox"
}

// AgentInbox is where anybody sends inputs for a public agent.
func (t Topics) AgentInbox(tenant, agent string) string {
	return t.base() + tenant + "/agents/" + agent + "/inbox"
}

// NodeState holds the retained birth of node, after its last will the death.
func (t Topics) NodeState(node string) string { return t.base() + "nodes/" + node + "/state" }

// Receipts is where receivers say what became of the commands of sender.
func (t Topics) Receipts(sender string) string { return t.base() + "nodes/" + sender + "/receipts" }

// Sync is where a fold asks the nodes of a tenant.
func (t Topics) Sync(tenant string, part int) string {
	return t.base() + tenant + "/sync/" + strconv.Itoa(part)
}

// Heads is where the nodes of a tenant answer a sync.
func (t Topics) Heads(tenant string, part int) string {
	return t.base() + tenant + "/heads/" + strconv.Itoa(part)
}

// Resend is where a fold gets what it asked to have sent again of a run.
func (t Topics) Resend(tenant, fold, node, run string) string {
	return t.base() + tenant + "/resend/" + fold + "/" + strconv.Itoa(Partition(tenant, run)) + "/" + node + "/" + run
}

// Of is the topic that a record is published to.
func (t Topics) Of(r *Record) string {
	switch r.Kind {
	case Command:
		return t.NodeInbox(r.Key.Tenant, r.ToNode)
	case Message:
		return r.Topic
	default:
		return t.Events(r.Key.Tenant, r.Node, r.Key.Run)
	}
}

// EventsFilters subscribes to the events of parts.
func (t Topics) EventsFilters(tenant string, parts []int) []string {
	return t.partFilters(tenant, "/events/", "/#", parts)
}

// HeadsFilters subscribes to the heads of parts.
func (t Topics) HeadsFilters(tenant string, parts []int) []string {
	return t.partFilters(tenant, "/heads/", "", parts)
}

// ResendFilters subscribes to what is sent again to fold of parts.
func (t Topics) ResendFilters(tenant, fold string, parts []int) []string {
	return t.partFilters(tenant, "/resend/"+fold+"/", "/#", parts)
}

// SyncFilter subscribes to what folds ask of a tenant's nodes.
func (t Topics) SyncFilter(tenant string) string { return t.base() + orAny(tenant) + "/sync/+" }

// NodeInboxFilter subscribes to the commands for node.
func (t Topics) NodeInboxFilter(tenant, node string) string { return t.NodeInbox(orAny(tenant), node) }

// AgentInboxFilter subscribes to the inputs for a public agent.
func (t Topics) AgentInboxFilter(tenant, agent string) string {
	return t.AgentInbox(orAny(tenant), agent)
}

// NodeStateFilter subscribes to the births and deaths of all nodes.
func (t Topics) NodeStateFilter() string { return t.NodeState("+") }

// partFilters gives one filter a part: a subscription that takes in more than it needs would break the scaling out.
func (t Topics) partFilters(tenant, before, after string, parts []int) []string {
	filters := make([]string, 0, len(parts))
	for _, p := range parts {
		filters = append(filters, t.base()+orAny(tenant)+before+strconv.Itoa(p)+after)
	}
	return filters
}

func orAny(tenant string) string {
	if tenant == "" {
		return "+"
	}
	return tenant
}

// CheckTopic says what is wrong with the topic of a raw message: UTF-8 without control characters and noncharacters, no
// wildcard, 1 to 65535 bytes, not starting with $, and not the root nor under it.
func (t Topics) CheckTopic(s string) error {
	if s == "" {
		return errors.New("is empty")
	}
	if len(s) > maxTopic {
		return fmt.Errorf("%.40q… is longer than %d bytes", s, maxTopic)
	}
	if err := checkTopicText(s); err != nil {
		return err
	}
	root := strings.TrimSuffix(t.base(), "/v1/")
	if rest, ok := strings.CutPrefix(s, root); ok && (rest == "" || rest[0] == '/') {
		return fmt.Errorf("%.40q is under %s, which is Postrider's own", s, root)
	}
	return nil
}

// TopicKind is what a topic is for.
type TopicKind int

// The kinds of topic under a root.
const (
	EventsTopic TopicKind = iota + 1
	NodeInboxTopic
	AgentInboxTopic
	NodeStateTopic
	ReceiptsTopic
	SyncTopic
	HeadsTopic
	ResendTopic
)

// Topic is a topic taken apart. Fields that its kind has not are zero.
type Topic struct {
	Kind                           TopicKind
	Tenant, Node, Run, Agent, Fold string
	Part                           int
}

// Parse takes apart a topic that a message came on. It refuses names that CheckName refuses and a part that is not the
// run's own, so that nothing reaches a consumer of the wrong partition.
func (t Topics) Parse(s string) (Topic, error) {
	rest, ok := strings.CutPrefix(s, t.base())
	if !ok {
		return Topic{}, fmt.Errorf("topic %.80q is not under %s", s, t.base())
	}
	// One more than the longest, so that a longer topic matches nothing.
	var room [7]string
	l := room[:0]
	for more := true; more && len(l) < cap(l); {
		var level string
		level, rest, more = strings.Cut(rest, "/")
		l = append(l, level)
	}

	var p Topic
	var part string
	switch {
	// First, and safe for a tenant named nodes: a part is a number, never state or receipts.
	case len(l) == 3 && l[0] == "nodes" && l[2] == "state":
		p = Topic{Kind: NodeStateTopic, Node: l[1]}
	case len(l) == 3 && l[0] == "nodes" && l[2] == "receipts":
		p = Topic{Kind: ReceiptsTopic, Node: l[1]}
	case len(l) == 3 && l[1] == "sync":
		p, part = Topic{Kind: SyncTopic, Tenant: l[0]}, l[2]
	case len(l) == 3 && l[1] == "heads":
		p, part = Topic{Kind: HeadsTopic, Tenant: l[0]}, l[2]
	case len(l) == 4 && l[1] == "nodes" && l[3] == "inbox":
		p = Topic{Kind: NodeInboxTopic, Tenant: l[0], Node: l[2]}
	case len(l) == 4 && l[1] == "agents" && l[3] == "inbox":
		p = Topic{Kind: AgentInboxTopic, Tenant: l[0], Agent: l[2]}
	case len(l) == 5 && l[1] == "events":
		p, part = Topic{Kind: EventsTopic, Tenant: l[0], Node: l[3], Run: l[4]}, l[2]
	case len(l) == 6 && l[1] == "resend":
		p, part = Topic{Kind: ResendTopic, Tenant: l[0], Fold: l[2], Node: l[4], Run: l[5]}, l[3]
	default:
		return Topic{}, fmt.Errorf("topic %.80q is none of Postrider's", s)
	}
	if err := p.check(part); err != nil {
		return Topic{}, fmt.Errorf("topic %.80q: %w", s, err)
	}
	if part != "" {
		p.Part, _ = strconv.Atoi(part)
	}
	return p, nil
}

func (p *Topic) check(part string) error {
	hasTenant := p.Kind != NodeStateTopic && p.Kind != ReceiptsTopic
	ofPart := p.Kind == SyncTopic || p.Kind == HeadsTopic
	ofRun := p.Kind == EventsTopic || p.Kind == ResendTopic
	for _, level := range [...]struct {
		has     bool
		name, s string
	}{
		{hasTenant, "tenant", p.Tenant},
		{!ofPart && p.Kind != AgentInboxTopic, "node", p.Node},
		{p.Kind == AgentInboxTopic, "agent", p.Agent},
		{p.Kind == ResendTopic, "fold", p.Fold},
	} {
		if !level.has {
			continue
		}
		if err := CheckName(level.s); err != nil {
			return fmt.Errorf("%s %w", level.name, err)
		}
	}
	if ofPart {
		if n, err := parsePartition(part); err != nil || strconv.Itoa(n) != part {
			return fmt.Errorf("part %.20q is not in 0-%d", part, Partitions-1)
		}
	}
	if ofRun {
		if err := CheckRun(p.Run); err != nil {
			return fmt.Errorf("run %w", err)
		}
		if own := strconv.Itoa(Partition(p.Tenant, p.Run)); part != own {
			return fmt.Errorf("part %.20q is not the run's own, %s", part, own)
		}
	}
	return nil
}

// Carries says why r may not have come on topic p: brokers grant rights by topic, so what a record says of itself must
// agree with where it came.
func (p *Topic) Carries(r *Record) error {
	ok := r.Key.Tenant == p.Tenant
	switch p.Kind {
	case EventsTopic, ResendTopic:
		ok = ok && r.Kind == Event && r.Node == p.Node && r.Key.Run == p.Run
	case NodeInboxTopic:
		ok = ok && r.Kind == Command
	default:
		ok = false
	}
	if !ok {
		return fmt.Errorf("%s LSN %d does not belong on the topic it came on, of tenant %q node %q run %q",
			r.Source(), r.LSN, p.Tenant, p.Node, p.Run)
	}
	return nil
}
