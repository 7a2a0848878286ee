// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci.c - a PCI bus of its own with one made-up device, so that a driver that gives up without hardware stays.
 *
 * The device answers configuration reads as an NVSwitch of NVIDIA's would and has no memory behind it: nvidia.ko's
 * probe of it fails, and its module stays loaded with its character devices, resource manager and no GPU.
 */
#include <linux/module.h>
#include <linux/numa.h>
#include <linux/pci.h>

#define BUS	0x10
#define DOMAIN	1

static u8 config[256];
static struct pci_bus *bus;
static struct pci_sysdata sysdata = { .domain = DOMAIN, .node = NUMA_NO_NODE };
static struct resource numbers = { .name = "fakepci", .start = BUS, .end = BUS, .flags = IORESOURCE_BUS };

static bool is_ours(const struct pci_bus *at, unsigned int devfn, int where, int size)
{
	return at->number == BUS && !devfn && where + size <= sizeof(config);
}

static int read_config(struct pci_bus *at, unsigned int devfn, int where, int size, u32 *value)
{
	*value = ~0;
	if (!is_ours(at, devfn, where, size))
		return PCIBIOS_DEVICE_NOT_FOUND;
	*value = 0;
	memcpy(value, config + where, size);
	return PCIBIOS_SUCCESSFUL;
}

/* Only command and status may be written: sizing the address registers finds none. */
static int write_config(struct pci_bus *at, unsigned int devfn, int where, int size, u32 value)
{
	if (!is_ours(at, devfn, where, size))
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (where == PCI_COMMAND)
		memcpy(config + where, &value, min(size, 2));
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops ops = { .read = read_config, .write = write_config };

static void put16(int at, u16 value)
{
	memcpy(config + at, &value, sizeof(value));
}

static int __init fakepci_init(void)
{
	LIST_HEAD(resources);

	put16(PCI_VENDOR_ID, PCI_VENDOR_ID_NVIDIA);
	put16(PCI_DEVICE_ID, 0x22a3);
	put16(PCI_SUBSYSTEM_VENDOR_ID, PCI_VENDOR_ID_NVIDIA);
	put16(PCI_SUBSYSTEM_ID, 0x1796);
	put16(PCI_CLASS_DEVICE, PCI_CLASS_BRIDGE_OTHER);
	config[PCI_REVISION_ID] = 0xa1;
	config[PCI_INTERRUPT_PIN] = 1;
	pci_add_resource(&resources, &numbers);
	bus = pci_scan_root_bus(NULL, BUS, &ops, &sysdata, &resources);
	if (!bus)
		return -ENODEV;
	pci_bus_add_devices(bus);
	return 0;
}

static void __exit fakepci_exit(void)
{
	pci_lock_rescan_remove();
	pci_stop_root_bus(bus);
	pci_remove_root_bus(bus);
	pci_unlock_rescan_remove();
}

module_init(fakepci_init);
module_exit(fakepci_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("qgpu test bed: a made-up PCI device");
