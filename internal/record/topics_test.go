package record

import (
	"hash/fnv"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// A part is in the topics of every run there is, and in what consumers subscribe to: these numbers can never change.
func TestPartitionsAreFixed(t *testing.T) {
	for _, c := range []struct {
		tenant, run string
		want        int
	}{
		{"default", "order-9", 12}, {"default", NodeRun, 8}, {"acme", "a", 4}, {"acme", "b", 13}, {"t", "r", 1},
		{"default", "demo", 13}, {"a", "bc", 3}, {"ab", "c", 7},
	} {
		if got := Partition(c.tenant, c.run); got != c.want {
			t.Errorf("Partition(%s, %s) = %d, want %d", c.tenant, c.run, got, c.want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		tenant, run := rapid.String().Draw(t, "tenant"), rapid.String().Draw(t, "run")
		h := fnv.New32a()
		h.Write([]byte(tenant + "\x00" + run))
		if got, want := Partition(tenant, run), int(h.Sum32()%16); got != want {
			t.Fatalf("%d, want %d", got, want)
		}
	})
}

func TestTopicsAreAsDesigned(t *testing.T) {
	com, msg, event := command(), Record{Kind: Message, Topic: "a/b"}, sample()
	com.ToNode = "hq"
	for _, root := range []string{"", "site/a"} {
		s := Topics{Root: root}
		base := root
		if root == "" {
			base = "postrider"
		}
		for _, c := range []struct {
			got, want string
			parsed    Topic
		}{
			{s.Events("acme", "edge-1", "a"), "/v1/acme/events/4/edge-1/a", Topic{Kind: EventsTopic, Tenant: "acme", Node: "edge-1", Run: "a", Part: 4}},
			{s.Events("default", "n", NodeRun), "/v1/default/events/8/n/~node", Topic{Kind: EventsTopic, Tenant: "default", Node: "n", Run: NodeRun, Part: 8}},
			{s.NodeInbox("acme", "hq"), "/v1/acme/nodes/hq/inbox", Topic{Kind: NodeInboxTopic, Tenant: "acme", Node: "hq"}},
			{s.NodeInbox("nodes", "state"), "/v1/nodes/nodes/state/inbox", Topic{Kind: NodeInboxTopic, Tenant: "nodes", Node: "state"}},
			{s.AgentInbox("acme", "billing"), "/v1/acme/agents/billing/inbox", Topic{Kind: AgentInboxTopic, Tenant: "acme", Agent: "billing"}},
			{s.NodeState("hq"), "/v1/nodes/hq/state", Topic{Kind: NodeStateTopic, Node: "hq"}},
			{s.NodeState("sync"), "/v1/nodes/sync/state", Topic{Kind: NodeStateTopic, Node: "sync"}},
			{s.Receipts("edge-1"), "/v1/nodes/edge-1/receipts", Topic{Kind: ReceiptsTopic, Node: "edge-1"}},
			{s.Sync("acme", 15), "/v1/acme/sync/15", Topic{Kind: SyncTopic, Tenant: "acme", Part: 15}},
			{s.Sync("nodes", 0), "/v1/nodes/sync/0", Topic{Kind: SyncTopic, Tenant: "nodes"}},
			{s.Heads("acme", 0), "/v1/acme/heads/0", Topic{Kind: HeadsTopic, Tenant: "acme"}},
			{s.Resend("acme", "wall", "edge-1", "b"), "/v1/acme/resend/wall/13/edge-1/b", Topic{Kind: ResendTopic, Tenant: "acme", Fold: "wall", Node: "edge-1", Run: "b", Part: 13}},
			{s.Of(&event), "/v1/default/events/12/edge-1/order-9", Topic{Kind: EventsTopic, Tenant: "default", Node: "edge-1", Run: "order-9", Part: 12}},
			{s.Of(&com), "/v1/default/nodes/hq/inbox", Topic{Kind: NodeInboxTopic, Tenant: "default", Node: "hq"}},
		} {
			if c.got != base+c.want {
				t.Errorf("%s, want %s", c.got, base+c.want)
			}
			if parsed, err := s.Parse(c.got); err != nil || parsed != c.parsed {
				t.Errorf("%s is %+v, %v", c.got, parsed, err)
			}
		}
		if got := s.Of(&msg); got != "a/b" {
			t.Error(got)
		}
	}
}

func TestFiltersTakeInTheirPartsOnly(t *testing.T) {
	var s Topics
	for _, c := range []struct {
		got  []string
		want string
	}{
		{s.EventsFilters("", []int{3, 7}), "postrider/v1/+/events/3/# postrider/v1/+/events/7/#"},
		{s.EventsFilters("acme", []int{3}), "postrider/v1/acme/events/3/#"},
		{s.HeadsFilters("", []int{0, 1}), "postrider/v1/+/heads/0 postrider/v1/+/heads/1"},
		{s.ResendFilters("", "wall", []int{9}), "postrider/v1/+/resend/wall/9/#"},
		{[]string{s.SyncFilter("acme"), s.SyncFilter("")}, "postrider/v1/acme/sync/+ postrider/v1/+/sync/+"},
		{[]string{s.NodeInboxFilter("", "hq")}, "postrider/v1/+/nodes/hq/inbox"},
		{[]string{s.AgentInboxFilter("acme", "billing")}, "postrider/v1/acme/agents/billing/inbox"},
		{[]string{s.NodeStateFilter()}, "postrider/v1/nodes/+/state"},
	} {
		if got := strings.Join(c.got, " "); got != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
	}
}

func TestParseTopicRefuses(t *testing.T) {
	for topic, want := range map[string]string{
		"":                                     "is not under postrider/v1/",
		"postrider/v2/acme/events/4/n/a":       "is not under",
		"other/v1/acme/events/4/n/a":           "is not under",
		"postrider/v1/":                        "is none of Postrider's",
		"postrider/v1/acme":                    "is none of Postrider's",
		"postrider/v1/acme/events/4/n":         "is none of Postrider's",
		"postrider/v1/acme/events/4/n/a/b":     "is none of Postrider's",
		"postrider/v1/acme/resend/f/4/n/a/b":   "is none of Postrider's",
		"postrider/v1/acme/resend/f/4/n/a/b/c": "is none of Postrider's",
		"postrider/v1/acme/event/4/n/a":        "is none of Postrider's",
		"postrider/v1/acme/events/5/n/a":       "part \"5\" is not the run's own, 4",
		"postrider/v1/acme/events/04/n/a":      "part \"04\" is not the run's own, 4",
		"postrider/v1/acme/resend/f/5/n/a":     "part \"5\" is not the run's own, 4",
		"postrider/v1//events/4/n/a":           "tenant is empty",
		"postrider/v1/acme/events/4//a":        "node is empty",
		"postrider/v1/acme/events/4/n/":        "run is empty",
		"postrider/v1/~node/events/4/n/a":      "tenant \"~node\"",
		"postrider/v1/acme/resend/x y/4/n/a":   "fold \"x y\"",
		"postrider/v1/acme/agents/a b/inbox":   "agent \"a b\"",
		"postrider/v1/acme/nodes/~node/inbox":  "node \"~node\"",
		"postrider/v1/nodes/~node/state":       "node \"~node\"",
		"postrider/v1/acme/sync/16":            "part \"16\" is not in 0-15",
		"postrider/v1/acme/heads/03":           "part \"03\" is not in 0-15",
		"postrider/v1/acme/heads/-1":           "part \"-1\" is not in 0-15",
	} {
		got, err := Topics{}.Parse(topic)
		if err == nil || !strings.Contains(err.Error(), want) || got != (Topic{}) {
			t.Errorf("%s: %+v, error %v, want %s", topic, got, err, want)
		}
	}
}

func TestTopicCarriesOnlyItsOwnRecords(t *testing.T) {
	var s Topics
	event, com := sample(), command()
	for _, c := range []struct {
		topic string
		r     *Record
		ok    bool
	}{
		{s.Events("default", "edge-1", "order-9"), &event, true},
		{s.Resend("default", "wall", "edge-1", "order-9"), &event, true},
		{s.Events("default", "edge-2", "order-9"), &event, false},
		{s.Events("default", "edge-1", "order-8"), &event, false},
		{s.Events("acme", "edge-1", "order-9"), &event, false},
		{s.Events("default", "edge-1", "order-9"), &com, false},
		{s.NodeInbox("default", "hq"), &com, true},
		{s.NodeInbox("acme", "hq"), &com, false},
		{s.NodeInbox("default", "hq"), &event, false},
		{s.Heads("default", 3), &event, false},
	} {
		topic, err := s.Parse(c.topic)
		if err != nil {
			t.Fatal(err)
		}
		if err := topic.Carries(c.r); (err == nil) != c.ok {
			t.Errorf("%s carries %v: %v", c.topic, c.r.Key, err)
		}
	}
}

func TestParsePartitions(t *testing.T) {
	for in, want := range map[string][]int{
		"0-3,7": {0, 1, 2, 3, 7}, "7,0-3": {0, 1, 2, 3, 7}, "5": {5}, "3-3": {3}, "1,1,0-1": {0, 1}, " 1 - 2 , 15 ": {1, 2, 15},
		"0-15": {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
	} {
		if got, err := ParsePartitions(in); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	for in, want := range map[string]string{
		"": "a number is missing", "1,,2": "a number is missing", "-3": "a number is missing", "3-": "a number is missing",
		"16": "16 is not in 0-15", "0-99999999999999999999": "is not in 0-15", "a": `"a" is not a number`, "+1": `"+1" is not a number`,
		"5-3": `"5-3" goes down`, "1-2-3": `"2-3" is not a number`,
	} {
		if got, err := ParsePartitions(in); err == nil || !strings.Contains(err.Error(), want) || got != nil {
			t.Errorf("%q: %v, error %v, want %s", in, got, err, want)
		}
	}
}

func TestChecks(t *testing.T) {
	topic := Topics{Root: "site/a"}.CheckTopic
	for _, c := range []struct {
		what  string
		check func(string) error
		in    string
		want  string // "": passes
	}{
		{"name", CheckName, "A-z_0", ""},
		{"name", CheckName, strings.Repeat("a", 64), ""},
		{"name", CheckName, strings.Repeat("a", 65), "longer than 64"},
		{"name", CheckName, "", "empty"},
		{"name", CheckName, NodeRun, "other than"},
		{"name", CheckName, "é", "other than"},
		{"run", CheckRun, NodeRun, ""},
		{"run", CheckRun, "~nodes", "other than"},
		{"branch", CheckBranch, ulid1, ""},
		{"branch", CheckBranch, "7ZZZZZZZZZZZZZZZZZZZZZZZZZ", ""},
		{"branch", CheckBranch, "80000000000000000000000000", "above 128 bits"},
		{"branch", CheckBranch, "0000000000000000000000000U", "character 26"},
		{"branch", CheckBranch, "0I000000000000000000000000", "character 2 "},
		{"branch", CheckBranch, "00L00000000000000000000000", "character 3 "},
		{"branch", CheckBranch, "000O0000000000000000000000", "character 4 "},
		{"branch", CheckBranch, "0000a000000000000000000000", "character 5 "},
		{"branch", CheckBranch, "0000000000000000000000000", "has 25 characters"},
		{"text", CheckText, "a <é>", ""},
		{"text", CheckText, "a\n", "U+000A"},
		{"text", CheckText, "\xed\xa0\x80", "not UTF-8"},
		{"root", CheckRoot, "postrider", ""},
		{"root", CheckRoot, "site/a", ""},
		{"root", CheckRoot, "", "empty"},
		{"root", CheckRoot, "/a", "empty level"},
		{"root", CheckRoot, "a/", "empty level"},
		{"root", CheckRoot, "a//b", "empty level"},
		{"root", CheckRoot, "a/+", "wildcard"},
		{"root", CheckRoot, "$SYS", "starts with $"},
		{"root", CheckRoot, strings.Repeat("a", 1024), ""},
		{"root", CheckRoot, strings.Repeat("a", 1025), "longer"},
		{"topic", topic, "zigbee2mqtt/lamp/set", ""},
		{"topic", topic, "/", ""},
		{"topic", topic, "a//b/ é\ufeff\U0001f600", ""},
		{"topic", topic, "postrider/v1", ""},
		{"topic", topic, "site/ab", ""},
		{"topic", topic, "site", ""},
		{"topic", topic, "a/$b", ""},
		{"topic", topic, strings.Repeat("a", 65535), ""},
		{"topic", topic, strings.Repeat("a", 65536), "longer"},
		{"topic", topic, "", "empty"},
		{"topic", topic, "site/a", "Postrider's own"},
		{"topic", topic, "site/a/", "Postrider's own"},
		{"topic", topic, "site/a/x", "Postrider's own"},
		{"topic", topic, "$SYS/x", "starts with $"},
		{"topic", topic, "a/+", "wildcard"},
		{"topic", topic, "a#", "wildcard"},
		{"topic", topic, "a\x00", "U+0000"},
		{"topic", topic, "a\x1f", "U+001F"},
		{"topic", topic, "a\u007f", "U+007F"},
		{"topic", topic, "a\u009f", "U+009F"},
		{"topic", topic, "a\ufffe", "U+FFFE"},
		{"topic", topic, "a\uffff", "U+FFFF"},
		{"topic", topic, "a\U0001ffff", "U+1FFFF"},
		{"topic", topic, "a\ufdd0", "U+FDD0"},
		{"topic", topic, "a\xff", "not UTF-8"},
		{"zero topic", Topics{}.CheckTopic, "postrider", "Postrider's own"},
	} {
		err := c.check(c.in)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %.40q: error %v, want %q", c.what, c.in, err, c.want)
		}
		if err != nil && len(err.Error()) > 400 {
			t.Errorf("%s: the error has %d bytes", c.what, len(err.Error()))
		}
	}
}

// The longest topic of the longest root fits MQTT's two length bytes.
func TestEveryTopicFits(t *testing.T) {
	n := strings.Repeat("n", 64)
	s := Topics{Root: strings.Repeat("r", maxRoot)}
	if got := s.Resend(n, n, n, n); len(got) > maxTopic {
		t.Error(len(got))
	} else if p, err := s.Parse(got); err != nil || !reflect.DeepEqual(p, Topic{Kind: ResendTopic, Tenant: n, Fold: n, Node: n, Run: n, Part: Partition(n, n)}) {
		t.Error(p, err)
	}
}
